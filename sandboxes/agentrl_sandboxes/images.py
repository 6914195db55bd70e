"""The images that sandboxes start from: named, built once, known by what is in their folder.

An image's tag holds a hash of its Dockerfile and package list, so another recipe is another image.
Where no registry is reached, the same programs come from Debian packages.
"""

import hashlib
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError

_HERE = Path(__file__).parent
FOLDER = _HERE / "images" if (_HERE / "images").is_dir() else _HERE.parent / "images"
"""Inside the package when installed, beside it in a checkout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImage:
    """An image in the engine. `digest` is the engine's content hash of it."""

    tag: str
    digest: str


def image_names() -> list[str]:
    """The images that can be built."""
    return sorted(path.parent.name for path in FOLDER.glob("*/Dockerfile"))


@cache
def tag_of(name: str) -> str:
    """The tag of a built-in image, or the name itself if it is none. Asked for by every sandbox."""
    recipe = FOLDER / name
    if name not in image_names():
        return name
    content = b"".join((recipe / part).read_bytes() for part in ("Dockerfile", "packages"))
    return f"agentrl/{name}:{hashlib.sha256(content).hexdigest()[:12]}"


def find_image(client: Any, name: str) -> BuiltImage | None:
    """The image of this name, if the engine has it. `client` is a docker.DockerClient."""
    import docker.errors

    try:
        image = client.images.get(tag_of(name))
    except docker.errors.ImageNotFound:
        return None
    return BuiltImage(tag=tag_of(name), digest=str(image.id))


def build_image(client: Any, name: str) -> BuiltImage:
    """Build a built-in image unless it is there. Raises ConfigError: unknown, or no way worked."""
    import docker.errors

    if name not in image_names():
        raise ConfigError(f"image {name}: those that can be built are {', '.join(image_names())}")
    if found := find_image(client, name):
        return found
    try:
        client.images.build(path=str(FOLDER / name), tag=tag_of(name), rm=True, forcerm=True)
    except (docker.errors.BuildError, docker.errors.APIError) as error:
        _from_packages(client, name, why=" ".join(str(error).split()))
    built = find_image(client, name)
    if built is None:
        raise ConfigError(f"image {name} was built, but the engine does not have it")
    return built


def _from_packages(client: Any, name: str, *, why: str) -> None:
    repository, _, tag = tag_of(name).partition(":")
    packages = (FOLDER / name / "packages").read_text(encoding="utf-8").split()
    with tempfile.TemporaryFile() as root:
        try:
            done = subprocess.run(
                [str(FOLDER / "from-debian-packages"), *packages],
                stdout=root, stderr=subprocess.PIPE, text=True, check=False,
            )  # fmt: skip
            failure = done.stderr if done.returncode else ""
        except OSError as error:
            failure = str(error)
        if failure:
            last = " ".join(failure.split())[-200:]
            raise ConfigError(f"image {name} can't be built: {why}; from packages: {last}")
        root.seek(0)
        environment = "PATH=/usr/local/bin:/usr/bin:/bin"
        client.api.import_image_from_data(
            root, repository=repository, tag=tag, changes=[f"ENV {environment}", "ENV LANG=C.UTF-8"]
        )
