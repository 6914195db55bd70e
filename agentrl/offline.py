"""Learning from recorded groups alone: offline GRPO, rejection fine-tuning, preferences.

No engine, no environment, no sandbox: a step of the learner is a recorded step, drawn again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import build
from agentrl.algorithms import AlgorithmConfig
from agentrl.config import RunConfig, changes_since
from agentrl.data import problem_at
from agentrl.errors import ConfigError, RecordError
from agentrl.grading import statistics
from agentrl.learning.batch import collate
from agentrl.learning.checkpoint import Progress, latest_checkpoint, load_checkpoint
from agentrl.metrics import open_metrics
from agentrl.protocols import Learner, Reporter
from agentrl.provenance import record_config, vocabulary_digest, write_provenance
from agentrl.store import ParquetStore
from agentrl.train import Stopwatch, mean_lag


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineRun:
    """What the loop holds. `checkpoint` saves the learner with a count of trained steps."""

    learner: Learner
    store: ParquetStore
    algorithm: AlgorithmConfig
    steps: int
    seed: int
    checkpoint_every: int
    checkpoint: Callable[[int], None]
    metrics: Callable[[Mapping[str, Any]], None]
    reporter: Reporter


def learn(run: OfflineRun) -> None:
    """Take learner steps until `run.steps`; stopped early, it leaves a whole checkpoint behind.

    Each epoch takes every recorded step once, in an order of its own. Raises NonFiniteLoss, and
    RecordError when a step can't be read or lacks what the algorithm needs.
    """
    recorded, learner = run.store.versions(), run.learner
    if not recorded:
        raise RecordError("there are no recorded steps to learn from")
    run.reporter.phase("train", run.steps - learner.version)
    try:
        while learner.version < run.steps:
            _step(run, problem_at(recorded, learner.version, run.seed))
            if run.checkpoint_every and learner.version % run.checkpoint_every == 0:
                run.checkpoint(learner.version)
            run.reporter.advance()
    finally:
        run.checkpoint(learner.version)


def _step(run: OfflineRun, recorded: int) -> None:
    clock, trained = Stopwatch(), run.learner.version
    groups = list(run.store.read(version=recorded))
    stats = run.learner.update(collate(groups, run.algorithm))
    clock.lap("update_s")
    row = {"kind": "step", "step": trained, "version": run.learner.version, "recorded": recorded}
    row |= {**stats, **statistics(groups).as_row(), "lag": mean_lag(groups, trained), **clock.laps}
    run.metrics(row)
    run.reporter.metrics(row)


def train_offline(config: RunConfig, record: Path, *, reporter: Reporter, resume: bool) -> None:
    """Train to `run.steps` on the trajectories of the run `record`.

    With `resume` it goes on from the newest checkpoint of `run.dir`; else the
    policy starts from `model.path`, or from the warm start in `run.dir` if that is there.
    Raises ConfigError, RecordError and NonFiniteLoss.
    """
    trajectories, folder = record / "trajectories", config.run.dir
    if not trajectories.is_dir():
        raise ConfigError(f"{record} has no trajectories: give the directory of a run")
    if folder.resolve() == record.resolve():
        raise ConfigError(f"run.dir is {record}, which is learned from: set another one")
    if not resume:
        build.refuse_old_run(config)
    store = ParquetStore(trajectories)
    found = latest_checkpoint(folder / "checkpoints")
    if found:
        changes = changes_since(folder / "config.yaml", config)
        reporter.note("; ".join([f"resuming from {found}", *changes]))
    warm = folder / "warm_start"
    start = str(warm) if (warm / "config.json").exists() else config.model.path
    policy = build.load(config, str(found) if found else start)
    _same_language(store, policy)
    learner = build.learner_of(config, policy, start)
    progress = load_checkpoint(found, learner) if found else Progress(version=0, cursor=0)
    record_config(config)
    write_provenance(folder, facts={"offline": str(record)})
    with open_metrics(folder, from_step=progress.version, tracker=config.run.tracker) as metrics:
        learn(
            OfflineRun(
                learner=learner,
                store=store,
                algorithm=config.algorithm,
                steps=config.run.steps,
                seed=config.run.seed,
                checkpoint_every=config.run.checkpoint_every,
                checkpoint=build.checkpointer(config, learner, policy),
                metrics=metrics,
                reporter=reporter,
            )
        )


def _same_language(store: ParquetStore, policy: build.Policy) -> None:
    """Raises ConfigError when the record's ids are of another vocabulary than the policy's."""
    own = vocabulary_digest(policy.tokenizer)
    for version in store.versions()[:1]:
        if store.metadata(version).get("tokenizer_sha256", own) != own:
            raise ConfigError(
                "the trajectories were recorded with another tokenizer than that of model.path: "
                "train the model that sampled them, or one of its family"
            )
