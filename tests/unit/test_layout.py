"""Prompts that a group shares are computed once: same logprobs, same gradients, fewer tokens."""

from dataclasses import replace
from random import Random

import pytest
import torch
import transformers as tr
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_cases import (
    VOCAB,
    batch_of,
    gradients,
    group,
    make_learner,
    tiny_model,
    trajectory,
    turn,
)

from agentrl.algorithms import AlgorithmConfig
from agentrl.learning.batch import Batch
from agentrl.learning.layout import layout_of
from agentrl.learning.packing import pack, token_logprobs
from agentrl.learning.plan import by_group, common_prefix

SIZE = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MODELS = [
    tr.LlamaConfig(**SIZE),
    tr.Qwen3Config(**SIZE, head_dim=8),
    tr.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=128),
]


def forked(seed: int = 0, groups: int = 3, size: int = 4) -> list:
    """Groups of one prompt each; some members also share their first turn, as after a fork."""
    draw = Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(1, VOCAB) for _ in range(count)]

    out = []
    for number in range(groups):
        prompt, call, answer = ids(draw.randint(8, 16)), ids(3), ids(4)
        members = []
        for member in range(size):
            first = call if number == 0 else ids(draw.randint(1, 4))
            turns = [turn(prompt, first, [-1.0] * len(first))]
            if number == 0 or member % 2:
                turns.append(turn(answer, ids(draw.randint(1, 5))))
            members.append(trajectory(*turns, member=member))
        out.append(
            group(members, [0.0, 1.0, *(float(draw.randint(0, 1)) for _ in range(size - 2))])
        )
    return out


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-5, atol=1e-6 * float(left.abs().max()))


@pytest.mark.parametrize("config", MODELS, ids=lambda c: c.model_type)
def test_logprobs_are_those_of_the_plain_layout(config) -> None:
    torch.manual_seed(0)
    model = tr.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    pack(model.eval())
    batch = batch_of(forked())
    given = (model, batch.input_ids, batch.lengths, batch.action_mask)
    plain = token_logprobs(*given, temperature=0.8)
    shared = token_logprobs(*given, temperature=0.8, groups_B=batch.groups)
    assert torch.allclose(plain.logprobs, shared.logprobs, atol=1e-5)
    assert torch.allclose(plain.entropy, shared.entropy, atol=1e-5)


@pytest.mark.parametrize("preset", ["default", "grpo", "gspo", "rloo", "ppo", "dpo"])
@pytest.mark.parametrize("budget", [1, 45, 10_000])
def test_sharing_changes_no_gradient(preset: str, budget: int) -> None:
    algorithm = AlgorithmConfig(preset=preset)
    batch = batch_of(forked(), algorithm)

    def grad(share: bool) -> torch.Tensor:
        reference = tiny_model(1) if algorithm.kl_coef else None
        return gradients(
            make_learner(
                algorithm, reference=reference, share_prefixes=share, micro_batch_tokens=budget
            ),
            batch,
        )

    plain = grad(False)
    assert plain.abs().sum() > 0 and close(plain, grad(True))


def test_gradient_checkpointing_goes_with_sharing() -> None:
    batch = batch_of(forked())
    plain = gradients(make_learner(AlgorithmConfig(), share_prefixes=False), batch)
    learner = make_learner(AlgorithmConfig(), gradient_checkpointing=True)
    assert close(plain, gradients(learner, batch))


def columns_computed(batch: Batch, groups: list[int] | None) -> int:
    return len(layout_of(batch.input_ids, batch.lengths.tolist(), groups).kept)


def test_a_prompt_is_computed_once_and_a_fork_its_common_turns() -> None:
    """8 members, prompt 20, response 5: 20 + 40 columns in place of 200."""
    members = [trajectory(turn(range(1, 21), [21 + m] * 5), member=m) for m in range(8)]
    batch = batch_of([group(members, [0.0, 1.0] * 4)])
    assert columns_computed(batch, None) == 200
    assert columns_computed(batch, batch.groups.tolist()) == 60
    fork = [trajectory(turn([1, 2, 3], [4, 5]), turn([6, 7], [8 + m]), member=m) for m in range(4)]
    batch = batch_of([group(fork, [0.0, 1.0, 0.0, 1.0])])
    assert columns_computed(batch, batch.groups.tolist()) == 7 + 4


def test_what_spares_little_is_computed_plainly() -> None:
    members = [trajectory(turn([1, 2 + m], [9] * 30), member=m) for m in range(4)]
    batch = batch_of([group(members, [0.0, 1.0, 0.0, 1.0])])
    assert columns_computed(batch, batch.groups.tolist()) == 4 * 32


def test_rows_of_other_groups_share_nothing() -> None:
    members = [trajectory(turn(range(1, 21), [21, 22 + m]), member=m) for m in range(4)]
    batch = batch_of([group(members, [0.0, 1.0, 0.0, 1.0])])
    assert columns_computed(batch, [0, 1, 2, 3]) == int(batch.lengths.sum())


def test_a_later_change_reaches_only_its_own_row() -> None:
    """Changing a token after the prefix changes no logprob of another member."""
    members = [trajectory(turn(range(1, 21), [21, 22 + m, 5]), member=m) for m in range(3)]
    batch = batch_of([group(members, [0.0, 1.0, 0.0])])
    model = pack(tiny_model())

    def logprobs(ids: torch.Tensor) -> torch.Tensor:
        return token_logprobs(
            model, ids, batch.lengths, batch.action_mask, temperature=1.0, groups_B=batch.groups
        ).logprobs

    changed = batch.input_ids.clone()
    changed[int(batch.lengths[0]) - 1] = 1
    before, after = logprobs(batch.input_ids), logprobs(changed)
    assert torch.allclose(before[3:], after[3:], atol=1e-6) and before[2] != after[2]


def test_garbage_at_observations_changes_no_bit() -> None:
    batch = batch_of(forked())
    dirty = replace(batch, advantages=torch.where(batch.action_mask, batch.advantages, torch.nan))
    first, second = (gradients(make_learner(AlgorithmConfig()), b) for b in (batch, dirty))
    assert torch.equal(first, second)


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(2, 40)), min_size=1, max_size=20)


@settings(max_examples=100)
@given(rows=ROWS, budget=st.integers(1, 150), data=st.data())
def test_parts_hold_every_row_once_within_the_budget(rows, budget, data) -> None:
    groups, lengths = [g for g, _ in rows], [n for _, n in rows]
    prefixes = {
        g: data.draw(st.integers(0, min(n for h, n in rows if h == g) - 1)) for g in set(groups)
    }
    parts = by_group(lengths, groups, prefixes, budget)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    for part in parts:
        cost = sum(lengths[r] - prefixes[groups[r]] for r in part)
        cost += sum(prefixes[g] for g in {groups[r] for r in part})
        assert len(part) == 1 or cost <= budget
        runs = [g for n, g in enumerate(groups[r] for r in part)]
        assert runs == sorted(runs), "the rows of a group are neighbours"


def test_a_common_prefix_is_shorter_than_the_shortest_row() -> None:
    rows = [torch.tensor(r) for r in ([1, 2, 3, 4], [1, 2, 3], [1, 2, 9, 9])]
    assert common_prefix(rows[:2]) == 2 and common_prefix(rows) == 2
    assert common_prefix([torch.tensor([1]), torch.tensor([1])]) == 0
    assert common_prefix([torch.tensor([1, 5]), torch.tensor([2, 5])]) == 0
