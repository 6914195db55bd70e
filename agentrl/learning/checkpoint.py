"""Checkpoints that are whole or absent, and from which a run goes on as if never stopped.

A checkpoint is a plain Hugging Face model folder plus `learner.pt` (optimiser, schedule, random
states) and `progress.json`, which is written last inside a temporary folder: after fsync the folder
is renamed into place, so that a folder with the final name is complete.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.errors import RecordError
from agentrl.learning.learner import PolicyLearner


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is: the policy version, and how many problems have been trained."""

    version: int
    cursor: int


def save_checkpoint(
    root: Path,
    learner: PolicyLearner,
    progress: Progress,
    *,
    keep: int,
    save_tokenizer: Callable[[Path], Any],
) -> Path:
    """Write `root`/step-NNNNNN and then remove all but the newest `keep` checkpoints."""
    final = root / f"step-{progress.version:06d}"
    if not is_whole(final):
        root.mkdir(parents=True, exist_ok=True)
        partial = root / f".partial-{final.name}-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        learner.model.save_pretrained(partial)
        save_tokenizer(partial)
        torch.save(learner.state(), partial / "learner.pt")
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        record = {**asdict(progress), "files": sizes}
        (partial / "progress.json").write_text(json.dumps(record), encoding="utf-8")
        _sync(partial)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        _sync_folder(root)
    for old in checkpoints(root)[:-keep]:
        shutil.rmtree(old)
    for partial in root.glob(".partial-*"):
        shutil.rmtree(partial, ignore_errors=True)
    return final


def load_checkpoint(folder: Path, learner: PolicyLearner) -> Progress:
    """Bring the learner's optimiser, schedule, random states and version back.

    The weights are loaded from the same folder when the model is. Raises RecordError.
    """
    try:
        record = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        state = torch.load(folder / "learner.pt", map_location="cpu", weights_only=True)
        progress = Progress(version=record["version"], cursor=record["cursor"])
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise RecordError(f"{folder} is no checkpoint: {error}") from None
    learner.load_state(state, version=progress.version)
    return progress


def latest_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    return next(reversed(checkpoints(root)), None)


def checkpoints(root: Path) -> list[Path]:
    """The whole checkpoints, oldest first; partial and damaged ones are passed over."""
    return [folder for folder in sorted(root.glob("step-*")) if is_whole(folder)]


def is_whole(folder: Path) -> bool:
    """Whether every file that was written is there in its size."""
    try:
        record = json.loads((folder / "progress.json").read_text(encoding="utf-8"))
        return all((folder / n).stat().st_size == size for n, size in record["files"].items())
    except (OSError, ValueError, KeyError):
        return False


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
