"""What a run is made of, as one frozen, checked tree; every field has a unit and a default.

A file gives some of the fields, `--set section.field=value` overrides them, and what results is
written to the run directory before the first step.
"""

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentrl.algorithms import AlgorithmConfig
from agentrl.errors import ConfigError


def _nameable(path: Path) -> Path:
    """Raises ValueError for what no file system takes as a name."""
    if b"\0" in os.fsencode(path):  # an encoding error is a ValueError, too
        raise ValueError("a path can't hold a null character")
    return path


class Section(BaseModel):
    """A part of the configuration: frozen; unknown keys and numbers that aren't are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RunSection(Section):
    """Where the run lives, how long it is, how often it looks up."""

    dir: Annotated[Path, AfterValidator(_nameable)] = Field(
        default=Path("runs/default"), description="run directory"
    )
    seed: int = Field(default=0, ge=0, description="root of all random streams")
    steps: int = Field(default=100, ge=0, description="learner steps in all")
    eval_every: int = Field(default=0, ge=0, description="steps between evaluations (0: never)")
    eval_problems: int = Field(default=64, ge=1, description="held-out problems in an evaluation")
    checkpoint_every: int = Field(
        default=10, ge=0, description="steps between checkpoints (0: at the end)"
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="whole checkpoints kept")
    max_fault_share: float = Field(
        default=0.5, ge=0, le=1, description="the run stops when more episodes of a step are faults"
    )
    max_silent_steps: int = Field(
        default=0,
        ge=0,
        description="the run stops after so many steps in a row without signal (0: never)",
    )
    tracker: Literal["none", "wandb", "trackio"] = Field(
        default="none", description="metrics service"
    )


class ModelSection(Section):
    """The policy: a folder or hub name, or the built-in tiny transformer ("tiny")."""

    path: str = Field(default="tiny", description="model folder, hub name, or 'tiny'")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="compute dtype"
    )
    device: str = Field(default="auto", description="torch device, or 'auto'")
    tool_format: str = Field(
        default="auto", description="tool-call parser, or 'auto': by the template"
    )
    tiny_layers: int = Field(default=4, ge=1, description="layers of the tiny transformer")
    tiny_hidden: int = Field(default=128, ge=16, description="width of the tiny transformer")


class WarmStartSection(Section):
    """Supervised start from scripted policies, before the first step (off with steps 0)."""

    steps: int = Field(default=0, ge=0, description="supervised updates")
    scripts: Mapping[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=lambda: {"oracle": 1.0},
        min_length=1,
        description="share of traces by script name",
    )
    traces: int = Field(default=2000, ge=1, description="traces recorded")
    batch: int = Field(default=64, ge=1, description="traces in an update")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")


class EngineSection(Section):
    """What samples from the policy."""

    name: str = Field(
        default="transformers", description="transformers, vllm, or a registered engine"
    )
    max_concurrent: int = Field(default=64, ge=1, description="sequences decoded together")
    context_tokens: int = Field(default=2048, ge=16, description="longest episode, in tokens")
    options: Mapping[str, Any] = Field(default_factory=dict, description="the engine's own options")


class SamplingSection(Section):
    """The behaviour distribution. Training needs top_p 1 and top_k 0."""

    temperature: float = Field(
        default=1.0, ge=0.01, description="softmax temperature (vLLM knows no lower one)"
    )
    top_p: float = Field(default=1.0, gt=0, le=1, description="nucleus mass; 1 is off")
    top_k: int = Field(default=0, ge=0, description="tokens kept; 0 is off")
    max_action_tokens: int = Field(default=256, ge=1, description="longest action, in tokens")


class RolloutSection(Section):
    """How episodes are run."""

    group_size: int = Field(default=8, ge=2, description="episodes of one problem")
    groups: int = Field(default=16, ge=1, description="problems in a step")
    max_turns: int = Field(default=8, ge=1, description="actions in an episode")
    max_observation_tokens: int = Field(default=512, ge=8, description="longest reply, in tokens")
    timeout_s: float = Field(
        default=120.0, gt=0, description="wall clock of an episode, all phases"
    )
    grade_timeout_s: float = Field(
        default=60.0, gt=0, description="wall clock of grading one group"
    )
    concurrency: int = Field(default=128, ge=1, description="episodes in flight")
    max_lag: int = Field(
        default=0, ge=0, description="steps that sampling may run ahead; 0 is synchronous"
    )


class EnvironmentSection(Section):
    """What the policy acts in."""

    name: str = Field(
        default="calculator", description="registered name, module:Class, or file.py[:Class]"
    )
    options: Mapping[str, Any] = Field(
        default_factory=dict, description="keyword arguments of its `problems`"
    )


class SandboxSection(Section):
    """Where tools run."""

    name: str = Field(default="auto", description="registered backend, or 'auto'")
    options: Mapping[str, Any] = Field(
        default_factory=dict, description="the backend's own options"
    )
    warm: int = Field(default=0, ge=0, description="sandboxes kept open ahead of their use")


class LearnerSection(Section):
    """The optimiser and the memory plan."""

    lr: float = Field(default=1e-6, ge=0, description="peak learning rate")
    schedule: Literal["constant", "cosine", "linear"] = Field(
        default="constant", description="after warm-up"
    )
    warmup_steps: int = Field(default=0, ge=0, description="linear warm-up, in optimiser steps")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW weight decay")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), description="AdamW moments"
    )
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradient clipping, L2 norm")
    epochs: int = Field(default=1, ge=1, description="passes over a batch")
    minibatches: int = Field(default=1, ge=1, description="optimiser steps in a pass")
    micro_batch_tokens: int = Field(default=8192, ge=1, description="tokens in one forward pass")
    share_prefixes: bool = Field(
        default=True, description="compute a group's common prompt once, where that spares enough"
    )
    gradient_checkpointing: bool = Field(default=False, description="recompute activations")
    lora_rank: int = Field(
        default=0, ge=0, description="rank of adapters on every linear layer; 0: train all weights"
    )


class RunConfig(Section):
    """The whole configuration of a run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    warm_start: WarmStartSection = WarmStartSection()
    engine: EngineSection = EngineSection()
    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()
    environment: EnvironmentSection = EnvironmentSection()
    sandbox: SandboxSection = SandboxSection()
    algorithm: AlgorithmConfig = AlgorithmConfig.model_validate({})
    learner: LearnerSection = LearnerSection()

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.sampling.top_p != 1 or self.sampling.top_k != 0:
            raise ValueError(
                "sampling.top_p and sampling.top_k cut the support, so engine and learner would "
                "score different distributions: train with top_p 1 and top_k 0"
            )
        if self.sampling.max_action_tokens >= self.engine.context_tokens:
            raise ValueError(
                f"sampling.max_action_tokens ({self.sampling.max_action_tokens}) must be below "
                f"engine.context_tokens ({self.engine.context_tokens})"
            )
        episodes = self.rollout.group_size * self.rollout.groups
        if self.learner.minibatches > episodes:
            raise ValueError(
                f"learner.minibatches ({self.learner.minibatches}) is more than the "
                f"{episodes} episodes of a step"
            )
        return self


def load_config(source: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file (None: the defaults) and apply `section.field=value` overrides.

    Raises ConfigError: one line that names the field, what is wrong and the nearest known name.
    """
    tree = {} if source is None else _read_yaml(source)
    for override in overrides:
        _override(tree, override)
    return parse_config(tree, where="the defaults" if source is None else str(source))


def parse_config(tree: Mapping[str, Any], *, where: str) -> RunConfig:
    """Check a tree of plain values. Raises ConfigError naming `where`."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        lines = "; ".join(_explain(e) for e in error.errors())
        raise ConfigError(f"{where}: {lines}") from None


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; `load_config` gives it back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


FOR_LIFE = ("run.seed", "model.tiny_layers", "model.tiny_hidden")
"""What a run keeps: another seed is another order of problems, another size another model."""


def changes_since(record: Path, config: RunConfig) -> list[str]:
    """What differs, but for its place, from the configuration at `record` (nothing without one).

    Raises ConfigError for a record that can't be read, or when a field of `FOR_LIFE` differs.
    """
    before = load_config(record) if record.exists() else config
    found = {
        f"{section}.{field}": f"{old!r} before, {getattr(new, field)!r} now"
        for section, new in config
        for field, old in getattr(before, section)
        if old != getattr(new, field) and (section, field) != ("run", "dir")
    }
    fixed = next((name for name in FOR_LIFE if name in found), None)
    if fixed:
        raise ConfigError(f"{fixed} can't change in a run: {found[fixed]}; set another run.dir")
    return [f"{name}: {text}" for name, text in found.items()]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level must be sections, not {type(tree).__name__}")
    return tree


def _override(tree: dict[str, Any], override: str) -> None:
    path, sign, text = override.partition("=")
    *sections, field = path.strip().split(".")
    if not sign or not sections:
        raise ConfigError(f"--set {override}: write section.field=value")
    here: Any = tree
    for section in sections:
        here = here.setdefault(section, {})
        if not isinstance(here, dict):
            raise ConfigError(f"--set {override}: {section} is not a section")
    try:
        here[field] = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        raise ConfigError(f"--set {override}: the value is not YAML") from None


def _explain(error: Any) -> str:
    *sections, name = [str(part) for part in error["loc"]] or [""]
    where = ".".join((*sections, name))
    if error["type"] != "extra_forbidden":
        message = error["msg"].removeprefix("Value error, ")
        return f"{where}: {message}" if where else message
    near = difflib.get_close_matches(name, list(_known(sections)), n=1)
    hint = f", did you mean {near[0]}?" if near else f" (known: {', '.join(_known(sections))})"
    return f"{where}: unknown key{hint}"


def _known(sections: Sequence[str]) -> Iterator[str]:
    model: type[BaseModel] = RunConfig
    for section in sections:
        annotation = model.model_fields[section].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return
        model = annotation
    yield from model.model_fields
