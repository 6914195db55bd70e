"""How much a step has to sample and to learn."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.metrics import read_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A mean episode, in tokens and seconds.

    `longest` is the longest episode of a step over the mean one, in sampled tokens: a synchronous
    step ends with it. `tool_s` is what one turn waits for its tools.
    """

    prompt: float
    actions: float
    observations: float
    turns: float
    longest: float = 1.0
    tool_s: float = 0.0

    @property
    def tokens(self) -> float:
        """The whole episode."""
        return self.prompt + self.actions + self.observations


def longest_workload(config: RunConfig) -> Workload:
    """Every episode as long as the configuration lets it grow: an upper bound."""
    context, turns = config.engine.context_tokens, config.rollout.max_turns
    prompt = context / 8
    actions = turns * config.sampling.max_action_tokens
    observations = (turns - 1) * config.rollout.max_observation_tokens
    fits = min(1.0, (context - prompt) / (actions + observations))
    return Workload(
        prompt=prompt, actions=actions * fits, observations=observations * fits, turns=turns
    )


def workload_of_run(run: Path) -> tuple[Workload, Mapping[str, float]]:
    """The mean episode of a run, and the median seconds of each part of its steps.

    Raises ConfigError without records.
    """
    from agentrl.replay.records import Records

    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "step"]
    if not rows:
        raise ConfigError(f"{run} has no finished step to learn from")
    records = Records(run)
    episodes = [t for g in records.groups(records.steps[-1]) for t in g.trajectories if t.turns]
    if not episodes:
        raise ConfigError(f"the last step of {run} has no episode with an action")
    actions = [t.action_tokens for t in episodes]
    prompts = [len(t.turns[0].observation.token_ids) for t in episodes]
    turns = fmean(len(t.turns) for t in episodes)
    workload = Workload(
        prompt=fmean(prompts),
        actions=fmean(actions),
        observations=fmean(len(t.token_ids) for t in episodes) - fmean(prompts) - fmean(actions),
        turns=turns,
        longest=max(actions) / fmean(actions),
        tool_s=fmean(row["tools_s"] / max(row["episodes"], 1) for row in rows) / turns,
    )
    parts = ("sample", "update", "publish")
    return workload, {part: median(row[f"{part}_s"] for row in rows) for part in parts}
