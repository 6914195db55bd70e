"""Seconds and bytes of a step, part by part: each part as fast as its narrowest roof allows.

Work of one token: 2N to read it (forward), 6N to learn from it (forward and backward), 8N with
activations computed again, 2N more for each pass that only scores it (reference, old policy). The
head's part is done for sampled tokens alone. A group's prompt of P tokens with G answers of R
tokens is computed once: P + GR tokens instead of G(P + R).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.planning.machines import Machine
from agentrl.planning.shapes import ModelShape
from agentrl.planning.workload import Workload

OPERATORS = 30
"""Operators of one layer, forward: what a step costs however small it is."""
FORWARD, BACKWARD = 1, 2
TOOL_TURN_S = 0.05
"""CPU time of a turn with a tool: a sandbox opened, Python started, both closed (bwrap, measured by
benchmarks/sandbox.py)."""
WEIGHTS_SHARE = 0.9
"""Share of a device's memory that may be planned; the rest is the libraries' own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Who has which accelerators: all do both in turn, unless `engine_gpus` are set apart."""

    gpus: int
    engine_gpus: int = 0

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ConfigError("--gpus: at least 1")
        if not 0 <= self.engine_gpus < max(self.gpus, 1):
            raise ConfigError(f"--engine-gpus: 0 to {self.gpus - 1}, so that the learner has some")

    @property
    def sampling(self) -> int:
        """Accelerators that sample."""
        return self.engine_gpus or self.gpus

    @property
    def learning(self) -> int:
        """Accelerators that learn."""
        return self.gpus - self.engine_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a step: the seconds under each of its roofs; the largest counts."""

    roofs: Mapping[str, float]

    @property
    def bound(self) -> str:
        """The narrowest roof."""
        return max(self.roofs, key=lambda name: self.roofs[name])

    @property
    def seconds(self) -> float:
        """What the part takes."""
        return self.roofs[self.bound]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A step, predicted. Bytes are of one accelerator; `parts` are in the order of the step."""

    parts: Mapping[str, Part]
    step_s: float
    action_tokens: float
    learner_bytes: float
    engine_bytes: float
    device_bytes: float
    tensor_parallel: int
    live_sequences: int
    sandboxes: int
    tool_cores: float
    step_price: float

    @property
    def bound(self) -> str:
        """The part that takes longest, and what it waits for."""
        name = max(self.parts, key=lambda part: self.parts[part].seconds)
        return f"{name}: {self.parts[name].bound}"

    @property
    def fits(self) -> bool:
        """Whether the learner and the engine each have enough memory."""
        return max(self.learner_bytes, self.engine_bytes) <= WEIGHTS_SHARE * self.device_bytes

    @property
    def tokens_s(self) -> float:
        """Sampled tokens a second over the whole step."""
        return self.action_tokens / self.step_s


def estimate(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    allocation: Allocation,
    workload: Workload,
) -> Estimate:
    """Predict a step of `config`."""
    value_bytes = 4 if config.model.dtype == "float32" else 2
    weights = shape.parameters * value_bytes
    width = _tensor_parallel(weights, machine, allocation.sampling)
    replicas = allocation.sampling // width
    episodes = config.rollout.groups * config.rollout.group_size
    cache = shape.kv_bytes(value_bytes) * _unshared(workload, config.rollout.group_size)
    room = WEIGHTS_SHARE * machine.memory_bytes * width - weights
    wanted = min(
        ceil(episodes / replicas),
        config.engine.max_concurrent,
        max(1, config.rollout.concurrency // replicas),
    )
    live = max(1, min(wanted, int(room // cache)))
    sampling = _sample(config, shape, machine, workload, width, replicas, live)
    learning = _update(config, shape, machine, workload, allocation.learning)
    publishing = Part(roofs={"bandwidth of the link": weights / machine.link_bytes_s})
    parts = {"sample": sampling, "update": learning, "publish": publishing}
    overlaps = config.rollout.max_lag > 0 and allocation.engine_gpus > 0
    both = (sampling.seconds, learning.seconds)
    step_s = (max(both) if overlaps else sum(both)) + publishing.seconds
    in_flight = min(episodes, config.rollout.concurrency)
    return Estimate(
        parts=parts,
        step_s=step_s,
        action_tokens=episodes * workload.actions,
        learner_bytes=_learner_bytes(config, shape, value_bytes, allocation.learning),
        engine_bytes=(weights + live * cache) / width,
        device_bytes=machine.memory_bytes,
        tensor_parallel=width,
        live_sequences=live * replicas,
        sandboxes=in_flight,
        tool_cores=episodes * workload.turns * workload.tool_s / sampling.seconds,
        step_price=step_s / 3600 * allocation.gpus * machine.price,
    )


def _unshared(workload: Workload, group_size: int) -> float:
    """Tokens of an episode that are its own: a group's prompt counts once."""
    return workload.prompt / group_size + workload.actions + workload.observations


def _tensor_parallel(weights: float, machine: Machine, gpus: int) -> int:
    """As few devices for a replica as leave half of their memory to the cache."""
    width = 1
    while width < gpus and weights > machine.memory_bytes * width / 2:
        width *= 2
    return min(width, gpus)


def _sample(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    workload: Workload,
    width: int,
    replicas: int,
    live: int,
) -> Part:
    episodes = ceil(config.rollout.groups * config.rollout.group_size / replicas)
    value_bytes = 4 if config.model.dtype == "float32" else 2
    weights = (shape.body + shape.head) * value_bytes
    seen = workload.prompt + (workload.actions + workload.observations) / 2
    read = weights + live * seen * shape.kv_bytes(value_bytes)
    read_s = read / (machine.bytes_s * machine.memory_share * width)
    call_s = shape.layers * OPERATORS * machine.call_s
    flops = 2 * (shape.body + shape.head) + shape.attention_flops(seen)
    engine_flops = machine.flops * machine.engine_share * width
    work_s = live * flops / engine_flops
    # The last episodes decode when others have ended, so longest x mean steps are the least.
    steps = workload.actions * max(episodes / live, workload.longest)
    prefilled = episodes * (workload.prompt / config.rollout.group_size + workload.observations)
    prefill_s = prefilled * (2 * shape.body + shape.attention_flops(seen)) / engine_flops
    slots = max(1, min(episodes, config.rollout.concurrency // replicas))
    sandbox_s = episodes * (workload.turns - 1) * TOOL_TURN_S / (machine.cores * width)
    waits = workload.turns * workload.tool_s + workload.actions * max(read_s, call_s)
    return Part(
        roofs={
            "compute": steps * work_s + prefill_s,
            "memory bandwidth": steps * read_s + prefill_s,
            "operator calls": steps * call_s + prefill_s,
            "sandboxes": sandbox_s,
            "tools and the longest wait": episodes / slots * waits,
        }
    )


def _update(
    config: RunConfig, shape: ModelShape, machine: Machine, workload: Workload, gpus: int
) -> Part:
    rollout, learner, algorithm = config.rollout, config.learner, config.algorithm
    episodes = rollout.groups * rollout.group_size
    each = _unshared(workload, rollout.group_size) if learner.share_prefixes else workload.tokens
    token = 2 * shape.body + shape.attention_flops(workload.tokens / 2)
    sampled = 2 * shape.head
    passes = FORWARD + BACKWARD + (FORWARD if learner.gradient_checkpointing else 0)
    passes *= learner.epochs
    scores = 1 if algorithm.kl_coef else 0
    scores += 1 if learner.epochs * learner.minibatches > 1 else 0
    work = episodes * (passes + scores) * (each * token + workload.actions * sampled)
    forwards = ceil(episodes * workload.tokens / gpus / learner.micro_batch_tokens)
    calls = forwards * (passes + scores) * shape.layers * OPERATORS
    # Adam reads and writes weights, gradients and both moments, in float32.
    adam = learner.epochs * learner.minibatches * 28 * shape.parameters / gpus
    adam_s = 0.0 if learner.lora_rank else adam / (machine.bytes_s * machine.memory_share)
    return Part(
        roofs={
            "compute": work / (machine.flops * machine.learner_share * gpus) + adam_s,
            "operator calls": calls * machine.call_s + adam_s,
        }
    )


def _learner_bytes(config: RunConfig, shape: ModelShape, value_bytes: int, gpus: int) -> float:
    """Weights, gradients, Adam's moments and the activations of one micro-batch."""
    learner = config.learner
    if learner.lora_rank:
        ends = shape.heads + 2 * shape.kv_heads + shape.heads
        adapters = shape.layers * learner.lora_rank * (
            6 * shape.hidden + ends * shape.head_dim + 3 * (shape.hidden + shape.feed_forward)
        )  # fmt: skip
        state = shape.parameters * value_bytes + adapters * 16
    else:
        # float32 masters, gradients and two moments; a pass in bfloat16 casts layer by layer.
        state = shape.parameters * 16
        state += shape.parameters * value_bytes if config.algorithm.kl_coef else 0
    # Inputs of each product and norm: 15 bytes of 2 for each unit (2205.05198), and the gated part.
    inside = 15 * shape.hidden // 2 + 3 * shape.feed_forward
    kept = shape.hidden if learner.gradient_checkpointing else inside
    activations = learner.micro_batch_tokens * value_bytes * (shape.layers * kept + inside)
    return state / gpus + activations
