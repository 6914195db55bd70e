"""What a workspace holds, as a tar that is the same for the same files: known by its hash.

The host writes the tar, from files that came over the supervisor's channel one by one, so nothing
that a sandbox has packed is ever unpacked here.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

PERMISSIONS = 0o777


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A regular file of a workspace, or a folder (whose `data` is None), with its permissions."""

    path: str
    mode: int = 0o644
    data: bytes | None = b""


def pack(entries: Iterable[Entry]) -> bytes:
    """A tar of them in order of their paths, without times, owners or links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in sorted(entries, key=lambda entry: PurePosixPath(entry.path).parts):
            info = tarfile.TarInfo(entry.path)
            info.mode = entry.mode & PERMISSIONS
            if entry.data is None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            else:
                info.size = len(entry.data)
                tar.addfile(info, io.BytesIO(entry.data))
    return out.getvalue()


def unpack(snapshot: bytes) -> Sequence[Entry]:
    """What it holds, folders before what lies in them; b"" is an empty workspace.

    Raises ValueError for anything but regular files and folders inside the workspace.
    """
    found: list[Entry] = []
    if not snapshot:
        return found
    try:
        with tarfile.open(fileobj=io.BytesIO(snapshot), mode="r:") as tar:
            for info in tar:
                pure = PurePosixPath(info.name)
                if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in info.name:
                    raise ValueError(f"snapshot: {info.name!r} is no path inside the workspace")
                if not (info.isreg() or info.isdir()):
                    raise ValueError(f"snapshot: {info.name!r} is neither a file nor a folder")
                file = tar.extractfile(info)
                data = None if file is None else file.read()
                found.append(Entry(path=str(pure), mode=info.mode & PERMISSIONS, data=data))
    except tarfile.TarError as error:
        raise ValueError(f"snapshot: not a tar ({error})") from None
    return found


def digest(snapshot: bytes) -> str:
    """The name that it is known by: the SHA-256 of its bytes."""
    return f"sha256:{hashlib.sha256(snapshot).hexdigest()}"
