"""Small models, trajectories and groups that the learning tests share."""

from collections.abc import Sequence
from random import Random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.algorithms import AlgorithmConfig
from agentrl.config import LearnerSection
from agentrl.learning.batch import Batch, collate
from agentrl.learning.learner import PolicyLearner
from agentrl.types import (
    ActionTokens,
    Ending,
    Group,
    ObservationTokens,
    Trajectory,
    Turn,
    Verdict,
    assistant,
    user,
)

torch.set_num_threads(1)  # models this small only lose by more

VOCAB = 32


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            initializer_range=0.3,
        )
    )  # fmt: skip


def turn(
    observed: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float] | None = ()
) -> Turn:
    scored = tuple(logprobs) or (-1.0,) * len(sampled) if logprobs is not None else None
    return Turn(
        observation=ObservationTokens(token_ids=tuple(observed)),
        action=ActionTokens(
            token_ids=tuple(sampled),
            logprobs=scored,
            versions=(0,) * len(sampled),
            finish="stop",
        ),
        message=assistant(""),
    )


def trajectory(*turns: Turn, member: int = 0, ending: Ending = Ending.ANSWERED) -> Trajectory:
    return Trajectory(
        id=f"m{member}", task_id="t", member=member, seed=0, prompt=(user("?"),), turns=turns,
        ending=ending,
    )  # fmt: skip


def group(trajectories: Sequence[Trajectory], verdicts: Sequence[Verdict | float]) -> Group:
    return Group(
        task_id="t",
        trajectories=tuple(trajectories),
        verdicts=tuple(v if isinstance(v, Verdict) else Verdict(reward=v) for v in verdicts),
    )


def random_trajectory(draw: Random, member: int = 0, max_turns: int = 3) -> Trajectory:
    def ids(most: int) -> list[int]:
        return [draw.randrange(1, VOCAB) for _ in range(draw.randint(1, most))]

    turns = []
    for _ in range(draw.randint(1, max_turns)):
        sampled = ids(5)
        turns.append(turn(ids(6), sampled, [-3 * draw.random() - 0.5 for _ in sampled]))
    return trajectory(*turns, member=member)


def random_groups(seed: int = 0, groups: int = 3, size: int = 4) -> list[Group]:
    draw = Random(seed)
    return [
        group(
            [random_trajectory(draw, member) for member in range(size)],
            [0.0, 1.0, *(float(draw.randint(0, 1)) for _ in range(size - 2))],
        )
        for _ in range(groups)
    ]


def make_learner(
    algorithm: AlgorithmConfig,
    *,
    model: LlamaForCausalLM | None = None,
    reference: LlamaForCausalLM | None = None,
    temperature: float = 1.0,
    total_steps: int | None = None,
    **section: object,
) -> PolicyLearner:
    return PolicyLearner(
        model or tiny_model(),
        learner=LearnerSection.model_validate({"lr": 1e-3, **section}),
        algorithm=algorithm,
        temperature=temperature,
        reference=reference,
        total_steps=total_steps,
    )


def gradients(learner: PolicyLearner, batch: Batch) -> torch.Tensor:
    """The gradient of one update, flat: read off AdamW's first moment, which starts at 0."""
    learner.update(batch)
    beta = learner.optimizer.param_groups[0]["betas"][0]
    state = learner.optimizer.state
    return torch.cat(
        [
            (state[p]["exp_avg"] if p in state else torch.zeros_like(p)).flatten() / (1 - beta)
            for p in learner.model.parameters()
        ]
    )


def weights_of(learner: PolicyLearner) -> torch.Tensor:
    return torch.cat([w.flatten().clone() for _, w in learner.weights()])


def batch_of(groups: Sequence[Group], algorithm: AlgorithmConfig | None = None) -> Batch:
    return collate(groups, algorithm or AlgorithmConfig())
