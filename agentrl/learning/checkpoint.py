"""Checkpoints that are whole or absent, and from which a run goes on as if never stopped.

A checkpoint `root`/step-NNNNNN is a plain Hugging Face model folder plus `learner.pt` (optimiser,
random states), `reference` if that moves, `progress.json` (version, cursor) and `manifest.json`
(size and hash of every file). It is written to a temporary folder, synced, and renamed into place.
"""

import hashlib
import json
import logging
import pickle
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.atomic import OLD, PARTIAL, remove_folder, whole_folder
from agentrl.errors import RecordError
from agentrl.learning.learner import PolicyLearner

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
LEARNER = "learner.pt"
REFERENCE = "reference"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is: the policy version, how many problems have been trained, and what else
    the loop needs, as JSON values.
    """

    version: int
    cursor: int
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


def save_checkpoint(
    root: Path,
    learner: PolicyLearner,
    progress: Progress,
    *,
    keep: int | None = None,
    save_tokenizer: Callable[[Path], object] | None = None,
) -> Path:
    """Write `root`/step-NNNNNN, then remove all but the newest `keep`; returns the folder.

    A whole checkpoint of this version is left as it is; a damaged one is replaced. However the
    process dies, every folder with a final name is complete. Raises OSError.
    """
    final = root / f"step-{progress.version:06d}"
    if _damage(final) is not None:
        with whole_folder(final) as partial:
            learner.save_model(partial)
            if save_tokenizer is not None:
                save_tokenizer(partial)
            if learner.moving_reference is not None:
                learner.moving_reference.save_pretrained(partial / REFERENCE)
            state = {"optimizer": learner.optimizer.state_dict(), "random": _random_state()}
            if learner.has_adapters:  # merging rounds, so the model folder can't give them back
                state["adapters"] = learner.trained()
            if learner.value_head is not None:
                state["value_head"] = learner.value_head.state_dict()
            torch.save(state, partial / LEARNER)
            (partial / PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")
            (partial / MANIFEST).write_text(json.dumps(_manifest(partial)), encoding="utf-8")
    prune_checkpoints(root, keep)
    return final


def load_checkpoint(folder: Path, learner: PolicyLearner) -> Progress:
    """Bring weights, optimiser, random states and version back, bit for bit.

    Raises RecordError when the folder is no whole checkpoint, or one of another model.
    """
    damage = _damage(folder)
    if damage is not None:
        raise RecordError(f"{folder} is no whole checkpoint: {damage}")
    try:
        progress = Progress(**json.loads((folder / PROGRESS).read_text(encoding="utf-8")))
        state = torch.load(folder / LEARNER, map_location="cpu", weights_only=True)
        if learner.has_adapters:
            learner.restore(state["adapters"])
        else:
            _load_weights(folder, learner.model)
        if learner.moving_reference is not None:
            _load_weights(folder / REFERENCE, learner.moving_reference)
        if learner.value_head is not None:
            learner.value_head.load_state_dict(state["value_head"])
        learner.optimizer.load_state_dict(state["optimizer"])
        _restore_random_state(state["random"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, pickle.PickleError) as error:
        reason = " ".join(str(error).split())[:200]
        raise RecordError(f"{folder} does not fit this run: {reason}") from None
    learner.version = progress.version
    return progress


def _load_weights(folder: Path, model: PreTrainedModel) -> None:
    saved = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(saved.state_dict())


def latest_checkpoint(root: Path, *, note: Callable[[str], None] = log.warning) -> Path | None:
    """The newest whole checkpoint, every hash checked, or None. `note` hears of skipped ones."""
    for partial in sorted(root.glob(f"{PARTIAL}*")):
        note(f"{partial}: skipped, a save was interrupted")
    for folder in reversed(_folders(root)):
        damage = _damage(folder, read=True)
        if damage is None:
            return folder
        note(f"{folder}: skipped, {damage}")
    return None


def prune_checkpoints(root: Path, keep: int | None) -> None:
    """Remove what is older than the newest `keep` whole checkpoints (None: nothing), and debris."""
    whole = [folder for folder in _folders(root) if _damage(folder) is None]
    if keep is not None and len(whole) > keep:
        oldest_kept = whole[-keep] if keep else None
        for folder in _folders(root):
            if oldest_kept is None or folder.name < oldest_kept.name:
                remove_folder(folder)
    for debris in (*root.glob(f"{OLD}*"), *root.glob(f"{PARTIAL}*")):
        shutil.rmtree(debris, ignore_errors=True)


def _folders(root: Path) -> list[Path]:
    return sorted(root.glob("step-*"))


def _damage(folder: Path, *, read: bool = False) -> str | None:
    """What is wrong with a checkpoint: None if every file has its size (`read`: and its hash)."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for name, (size, digest) in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes and not {size}"
            if read and _digest(path) != digest:
                return f"{name} was changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"it has no readable {MANIFEST}"
    return None


def _manifest(folder: Path) -> Mapping[str, Mapping[str, tuple[int, str]]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        "files": {
            str(path.relative_to(folder)): (path.stat().st_size, _digest(path)) for path in paths
        }
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _random_state() -> dict[str, Any]:
    """The state of every global generator, in values that load without running code."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": (version, words, gauss),
        "numpy": (kind, keys.tolist(), position, has_gauss, cached),  # pyright: ignore
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _restore_random_state(state: Mapping[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
