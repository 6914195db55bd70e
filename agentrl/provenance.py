"""What a run was made from: enough to say later whether two runs could be the same."""

import hashlib
import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("agentrl", "torch", "transformers", "tokenizers", "numpy", "gymnasium", "vllm")


def digest(text: str) -> str:
    """The SHA-256 of a text, as hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_provenance(folder: Path, *, facts: dict[str, Any]) -> dict[str, Any]:
    """Write provenance.json: code revision, package versions, machine, and the given facts.

    Returns what was written.
    """
    record = {
        "git": _git_revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        **facts,
    }
    (folder / "provenance.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The checkout's revision, "+dirty" when files differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
