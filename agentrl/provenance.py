"""What a run was made from: enough to say later whether two runs could be the same."""

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from agentrl.atomic import whole_file
from agentrl.config import RunConfig, dump_config
from agentrl.protocols import SandboxProvider
from agentrl.rollout import Stage

PACKAGES = ("agentrl", "torch", "transformers", "tokenizers", "numpy", "gymnasium", "vllm")


def digest(text: str) -> str:
    """The SHA-256 of a text, as hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def vocabulary_digest(tokenizer: Any) -> str:
    """The hash of a tokenizer's vocabulary: every text with its id."""
    return digest(repr(sorted(tokenizer.get_vocab().items())))


def record_run(
    config: RunConfig, tokenizer: Any, stage: Stage, sandbox: Mapping[str, str]
) -> dict[str, str]:
    """Write config.yaml and provenance.json; returns what the run's trajectories carry of them.

    That is enough to replay a file of trajectories far from its run.
    """
    record_config(config)
    facts = stage_facts(config, tokenizer, stage, sandbox)
    beside = {name: facts[name] for name in ("tokenizer_sha256", "template_sha256")}
    write_provenance(config.run.dir, facts={**beside, "sandbox": sandbox})
    return facts


def stage_facts(
    config: RunConfig, tokenizer: Any, stage: Stage, sandbox: Mapping[str, str]
) -> dict[str, str]:
    """What a file of trajectories carries of where they were sampled."""
    renderer: Any = stage.renderer
    versions = _versions()
    return {
        "tokenizer_sha256": vocabulary_digest(tokenizer),
        "template_sha256": digest(renderer.template),
        "sandbox": json.dumps(sandbox),
        "config": config.model_dump_json(),
        "versions": json.dumps(versions),
    }


def record_config(config: RunConfig) -> None:
    """Write config.yaml, resolved, to the run directory, which is made if it is missing."""
    config.run.dir.mkdir(parents=True, exist_ok=True)
    with whole_file(config.run.dir / "config.yaml") as file:
        file.write(dump_config(config).encode())


def sandbox_facts(sandboxes: SandboxProvider | None) -> dict[str, str]:
    """What a backend says of itself: isolation, version, image digest. Asks it: once a run."""
    if sandboxes is None:
        return {}
    return {"isolation": sandboxes.isolation, **sandboxes.describe()}


def write_provenance(folder: Path, *, facts: dict[str, Any]) -> dict[str, Any]:
    """Write provenance.json: code revision, package versions, machine, and the given facts.

    Returns what was written.
    """
    record = {**_versions(), "platform": platform.platform(), **facts}
    with whole_file(folder / "provenance.json") as file:
        file.write(f"{json.dumps(record, indent=2)}\n".encode())
    return record


def _versions() -> dict[str, Any]:
    return {
        "git": _git_revision(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


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
