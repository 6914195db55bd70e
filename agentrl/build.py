"""The only file that names concrete classes: turns a configuration into running parts.

`open_run` is for programs that change a part before they train; every other public function is a
verb of the command line and owns its event loop.
"""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl import evaluate as evaluation
from agentrl.alarms import Watch
from agentrl.atomic import whole_folder
from agentrl.config import RunConfig, changes_since
from agentrl.data import ProblemStream, check_lengths, problem_at
from agentrl.engines.weights import InProcessWeightSync
from agentrl.errors import ConfigError
from agentrl.learning.checkpoint import (
    Progress,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from agentrl.learning.learner import PolicyLearner
from agentrl.learning.supervised import fit
from agentrl.metrics import open_metrics, read_metrics
from agentrl.models import load_policy
from agentrl.plugins import (
    check_options,
    find_engine,
    find_environment,
    open_sandboxes,
    problems_of,
    tools_of,
)
from agentrl.protocols import (
    EnvironmentClass,
    Harness,
    InferenceEngine,
    Reporter,
    SandboxProvider,
    Split,
)
from agentrl.provenance import record_run, sandbox_facts, stage_facts
from agentrl.rendering import check_template, make_renderer
from agentrl.rollout import Limits, Stage, WarmSandboxes, run_script
from agentrl.store import ParquetStore
from agentrl.train import Pace, Run
from agentrl.train import train as run_loop
from agentrl.types import Group, Problem, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A loaded model with its tokenizer, and where it came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def decode(self, token_ids: Sequence[int]) -> str:
        """The exact text of some ids, control tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)  # pyright: ignore[reportReturnType]


def train(config: RunConfig, *, reporter: Reporter, resume: bool = True) -> None:
    """Train to `run.steps`, from the newest whole checkpoint if there is one and `resume`.

    Writes the run directory. Raises ConfigError, PluginError and the TrainingErrors.
    """
    if not resume:
        refuse_old_run(config)
    asyncio.run(_train(config, reporter))


def refuse_old_run(config: RunConfig) -> None:
    """Raises ConfigError when the run directory holds a checkpoint to go on from."""
    if latest_checkpoint(config.run.dir / "checkpoints"):
        raise ConfigError(
            f"{config.run.dir} already holds a run: resume it, or set another run.dir"
        )


def warm_start(config: RunConfig, *, reporter: Reporter, force: bool = False) -> Path:
    """Fit the policy to scripted traces; returns the model folder in the run directory.

    A folder that is there already is taken as it is, unless `force`.
    """
    return asyncio.run(_warm_start(config, reporter, force=force))


def evaluate(
    config: RunConfig,
    *,
    reporter: Reporter,
    problems: int,
    samples: int,
    split: Split = "test",
    model: str | None = None,
    greedy: bool = False,
) -> evaluation.Evaluation:
    """Success of a policy on `problems` of a split, each tried `samples` times."""
    groups = asyncio.run(
        _rollout(config, reporter, model, split, problems=problems, size=samples, greedy=greedy)
    )
    return evaluation.summarise(groups, samples=samples)


def rollout(
    config: RunConfig,
    *,
    reporter: Reporter,
    problems: int,
    model: str | None = None,
    split: Split = "train",
    out: Path | None = None,
) -> list[Group]:
    """Sample and grade some groups without learning from them.

    `out` is a folder to store them in, as step 0, with what it takes to replay them.
    """
    size = config.rollout.group_size
    rolled = _rollout(
        config, reporter, model, split, problems=problems, size=size, greedy=False, out=out
    )
    return asyncio.run(rolled)


@asynccontextmanager
async def open_run(config: RunConfig, *, reporter: Reporter) -> AsyncGenerator[Run]:
    """All parts of a run, for `agentrl.train.train`: warm-started or resumed, closed at the end.

    Any part may be replaced before the loop starts. Raises what `train` raises.
    """
    run, found = config.run, latest_checkpoint(config.run.dir / "checkpoints")
    if found:
        changes = changes_since(run.dir / "config.yaml", config)
        reporter.note("; ".join([f"resuming from {found}", *changes]))
    start = config.model.path
    if config.warm_start.steps:
        start = str(await _warm_start(config, reporter, force=False))
    environment, options = find_environment(config.environment.name), config.environment.options
    problems = problems_of(environment, "train", options)
    held_out = (
        problems_of(environment, "test", options, run.eval_problems) if run.eval_every else ()
    )
    policy = load(config, str(found) if found else start)
    learner = learner_of(config, policy, start)
    progress = load_checkpoint(found, learner) if found else Progress(version=0, cursor=0)
    async with open_stage(config, environment, policy, problems) as stage:
        _check_lengths(config, stage, [*problems, *held_out])
        sandbox = sandbox_facts(stage.sandboxes)
        if sandbox:
            shown = ", ".join(f"{name} {value}" for name, value in sandbox.items())
            reporter.note(f"sandboxes: {shown}")
        facts = record_run(config, policy.tokenizer, stage, sandbox)
        store = ParquetStore(run.dir / "trajectories", metadata=facts, decode=policy.decode)
        with open_metrics(run.dir, from_step=progress.version, tracker=run.tracker) as metrics:
            yield Run(
                stage=stage,
                learner=learner,
                weights=InProcessWeightSync(stage.engine),  # type: ignore[arg-type]
                store=store,
                problems=_stream(config, problems, store, progress.version),
                algorithm=config.algorithm,
                pace=_pace(config),
                checkpoint=checkpointer(config, learner, policy),
                evaluate=lambda: _evaluate(config, stage, held_out, reporter),
                metrics=metrics,
                reporter=reporter,
                cursor=progress.cursor,
                watch=Watch(read_metrics(run.dir / "metrics.jsonl")),
            )


async def _train(config: RunConfig, reporter: Reporter) -> None:
    async with open_run(config, reporter=reporter) as run:
        await run_loop(run)


async def _warm_start(config: RunConfig, reporter: Reporter, *, force: bool) -> Path:
    section, folder = config.warm_start, config.run.dir / "warm_start"
    if not force and (folder / "config.json").exists():
        return folder
    policy = load(config, config.model.path)
    if not section.steps:
        raise ConfigError("warm_start.steps is 0: set it to the number of supervised updates")
    environment = find_environment(config.environment.name)
    missing = sorted(set(section.scripts) - set(environment.scripts))
    if missing:
        raise ConfigError(
            f"warm_start.scripts names {', '.join(missing)}, but {config.environment.name} has "
            f"{', '.join(sorted(environment.scripts))}"
        )
    problems = problems_of(environment, "train", config.environment.options)
    async with open_stage(config, environment, policy, problems) as stage:
        _check_lengths(config, stage, problems)
        traces = await _traces(config, stage, problems, reporter)
    reporter.phase("warm start", section.steps)
    fit(
        policy.model,
        traces,
        steps=section.steps,
        batch=section.batch,
        lr=section.lr,
        seed=config.run.seed,
        report=lambda _: reporter.advance(),
    )
    with whole_folder(folder) as partial:
        policy.model.save_pretrained(partial)
        policy.tokenizer.save_pretrained(partial)
    return folder


async def _traces(
    config: RunConfig, stage: Stage, problems: Sequence[Problem], reporter: Reporter
) -> list[Trajectory]:
    """Episodes of scripted policies, in the set shares, on training problems."""
    section, seed, environment = config.warm_start, config.run.seed, stage.environment
    names, shares = list(section.scripts), list(section.scripts.values())
    chosen = Random(f"traces:{seed}").choices(names, shares, k=section.traces)
    gate = asyncio.Semaphore(config.rollout.concurrency)
    reporter.phase("record traces", section.traces)

    async def one(index: int, name: str) -> Trajectory:
        problem = problem_at(problems, index, seed)
        async with gate:
            episode = await run_script(stage, problem, environment.scripts[name], seed=index)
        reporter.advance()
        return episode.trajectory

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(i, name)) for i, name in enumerate(chosen)]
    return [task.result() for task in running]


async def _rollout(
    config: RunConfig,
    reporter: Reporter,
    model: str | None,
    split: Split,
    *,
    problems: int,
    size: int,
    greedy: bool,
    out: Path | None = None,
) -> list[Group]:
    environment = find_environment(config.environment.name)
    weights = model or newest(config)
    policy = load(config, weights)
    chosen = problems_of(environment, split, config.environment.options, problems)
    async with open_stage(config, environment, policy, chosen) as stage:
        played = replace(stage, temperature=0.0) if greedy else stage
        _check_lengths(config, stage, chosen)
        groups = await _groups(config, played, chosen, reporter, size=size)
        if out is not None:
            sampled = _sampled_by(config, weights)
            facts = stage_facts(sampled, policy.tokenizer, stage, sandbox_facts(stage.sandboxes))
            ParquetStore(out, metadata=facts, decode=policy.decode).append(groups, version=0)
        return groups


def _sampled_by(config: RunConfig, weights: str) -> RunConfig:
    """The configuration in which version 0 is these weights, whatever the run began with."""
    parts = {
        "model": config.model.model_copy(update={"path": weights}),
        "warm_start": config.warm_start.model_copy(update={"steps": 0}),
    }
    return config.model_copy(update=parts)


async def _evaluate(
    config: RunConfig, stage: Stage, problems: Sequence[Problem], reporter: Reporter
) -> evaluation.Evaluation:
    groups = await _groups(config, stage, problems, reporter, size=1)
    return evaluation.summarise(groups, samples=1)


async def _groups(
    config: RunConfig, stage: Stage, problems: Sequence[Problem], reporter: Reporter, *, size: int
) -> list[Group]:
    return await evaluation.run_groups(
        stage,
        problems,
        size=size,
        seed=config.run.seed,
        concurrency=config.rollout.concurrency,
        reporter=reporter,
    )


@asynccontextmanager
async def open_stage(
    config: RunConfig, environment: EnvironmentClass, policy: Policy, problems: Sequence[Problem]
) -> AsyncGenerator[Stage]:
    """The engine, the renderer and, if a problem needs them, the sandboxes; closed at the end."""
    names = [tool.name for tool in tools_of(environment)]
    renderer = make_renderer(
        policy.tokenizer, tool_format_name=config.model.tool_format, tool_names=names
    )
    fatal = [finding.what for finding in check_template(renderer) if finding.level == "fatal"]
    if fatal:
        raise ConfigError(f"the chat template can't be used: {'; '.join(fatal)}")
    async with _engine(config, policy) as engine, _sandboxes(config, problems) as sandboxes:
        yield Stage(
            engine=engine,
            renderer=renderer,
            environment=environment,
            sandboxes=sandboxes,
            limits=limits_of(config),
            temperature=config.sampling.temperature,
        )


def _check_lengths(config: RunConfig, stage: Stage, problems: Sequence[Problem]) -> None:
    """Raise ConfigError for prompts that leave no room to answer: nothing is ever cut."""
    if not isinstance(stage.environment(sandbox=None), Harness):  # it asks in words of its own
        tools, limit = tools_of(stage.environment), config.engine.context_tokens
        check_lengths(problems, stage.renderer, tools, context_tokens=limit)


def _stream(
    config: RunConfig, problems: Sequence[Problem], store: ParquetStore, version: int
) -> ProblemStream:
    """Which problem is next; it knows the pass rates of the steps that were trained."""
    stream = ProblemStream(problems, seed=config.run.seed)
    for step in store.versions() if stream.has_band else ():
        if step < version:
            stream.learn(store.read(version=step))
    return stream


def limits_of(config: RunConfig) -> Limits:
    """What an episode may use."""
    return Limits(
        max_turns=config.rollout.max_turns,
        max_action_tokens=config.sampling.max_action_tokens,
        context_tokens=config.engine.context_tokens,
        max_observation_tokens=config.rollout.max_observation_tokens,
        timeout_s=config.rollout.timeout_s,
        grade_timeout_s=config.rollout.grade_timeout_s,
    )


@asynccontextmanager
async def _sandboxes(
    config: RunConfig, problems: Sequence[Problem]
) -> AsyncGenerator[SandboxProvider | None]:
    """The configured backend, kept warm if asked for; None where no problem needs one.

    What killed runs have left is removed first.
    """
    section = config.sandbox
    if not any(problem.needs_sandboxes for problem in problems):
        yield None
        return
    run_id = str(config.run.dir.resolve())
    provider = open_sandboxes(section.name, section.options, run_id=run_id)
    await provider.prune("")
    if not section.warm:
        yield provider
        return
    async with WarmSandboxes(provider, size=section.warm) as warm:
        yield warm


def _engine(config: RunConfig, policy: Policy) -> AbstractAsyncContextManager[InferenceEngine]:
    """The engine that the configuration names, around a copy of the policy."""
    section = config.engine
    sizes = {"max_concurrent": section.max_concurrent, "context_tokens": section.context_tokens}
    twice = sorted(set(sizes) & set(section.options))
    if twice:
        raise ConfigError(f"engine.options.{twice[0]}: set engine.{twice[0]} itself")
    engine_class = find_engine(section.name)
    check_options(engine_class, section.options, where="engine.options")
    return engine_class(copy.deepcopy(policy.model), **sizes, **section.options)


def newest(config: RunConfig) -> str:
    """The best known policy of a run directory: checkpoint, warm start, or the base model."""
    warm = config.run.dir / "warm_start"
    found = latest_checkpoint(config.run.dir / "checkpoints")
    return str(found or (warm if (warm / "config.json").exists() else config.model.path))


def load(config: RunConfig, source: str) -> Policy:
    """A model folder (or hub name, or "tiny") as the configuration wants it. Raises ConfigError."""
    model, tokenizer = load_policy(
        config.model.model_copy(update={"path": source}),
        context_tokens=config.engine.context_tokens,
        seed=config.run.seed,
    )
    return Policy(model=model, tokenizer=tokenizer)


def learner_of(config: RunConfig, policy: Policy, start: str) -> PolicyLearner:
    """The run's learner around `policy`; `start` is what its reference policy is loaded from.

    With adapters the learner's model is that of `start`, and `policy` is left as it is.
    """
    adapted = config.learner.lora_rank > 0
    reference = load(config, start).model if config.algorithm.kl_coef and not adapted else None
    return PolicyLearner(
        load(config, start).model if adapted else policy.model,
        learner=config.learner,
        algorithm=config.algorithm,
        temperature=config.sampling.temperature,
        reference=reference,
        total_steps=config.run.steps * config.learner.epochs * config.learner.minibatches,
    )


def checkpointer(
    config: RunConfig, learner: PolicyLearner, policy: Policy
) -> Callable[[int], None]:
    """Saves the learner into the run directory, with the cursor that it is given."""

    def save(cursor: int) -> None:
        save_checkpoint(
            config.run.dir / "checkpoints",
            learner,
            Progress(version=learner.version, cursor=cursor),
            keep=config.run.keep_checkpoints,
            save_tokenizer=policy.tokenizer.save_pretrained,
        )

    return save


def _pace(config: RunConfig) -> Pace:
    run, rollout = config.run, config.rollout
    return Pace(
        steps=run.steps,
        groups=rollout.groups,
        group_size=rollout.group_size,
        concurrency=rollout.concurrency,
        max_lag=rollout.max_lag,
        eval_every=run.eval_every,
        checkpoint_every=run.checkpoint_every,
        max_fault_share=run.max_fault_share,
        max_silent_steps=run.max_silent_steps,
        seed=run.seed,
    )
