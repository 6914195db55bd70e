"""Fingerprints: they change exactly when a weight does."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engines.weights import checksum_of, copy_weights, fingerprint_of
from agentrl.errors import WeightsNotApplied


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.inner = torch.nn.Linear(3, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20),
    place=st.integers(0, 19),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
def test_any_single_change_changes_the_checksum(
    values: list[float], place: int, dtype: torch.dtype
) -> None:
    weight = torch.tensor(values).to(dtype)
    other = weight.clone()
    other[place % len(values)] += 1 + other[place % len(values)].abs()
    assert checksum_of(weight) == checksum_of(weight.clone())
    if not torch.equal(weight, other):
        assert checksum_of(weight) != checksum_of(other)


def test_moved_values_and_signs_change_it() -> None:
    weight = torch.randn(7, 5)
    seen = {checksum_of(w) for w in (weight, weight.flip(0), weight.roll(1, 1), -weight)}
    assert len(seen) == 4
    assert checksum_of(torch.zeros(3)) != checksum_of(torch.tensor([0.0, -0.0, 0.0]))


def test_a_long_tensor_is_summed_in_pieces_to_the_same_number() -> None:
    weight = torch.zeros(3 * (1 << 20) + 17)
    plain = checksum_of(weight)
    weight[-1] = 1e-30
    assert checksum_of(weight) != plain
    assert checksum_of(weight[None].T.T) == checksum_of(weight)


def test_names_are_part_of_the_fingerprint() -> None:
    a = torch.nn.ModuleDict({"x": torch.nn.Linear(2, 2, bias=False)})
    b = torch.nn.ModuleDict({"y": copy.deepcopy(a["x"])})
    assert fingerprint_of(a) != fingerprint_of(b)
    assert fingerprint_of(a) == fingerprint_of(copy.deepcopy(a))


def test_copied_weights_arrive_in_the_engine_s_dtype() -> None:
    learner, engine = Tied(), Tied().to(torch.bfloat16)
    with torch.no_grad():
        given_print = copy_weights(learner.named_parameters(), engine)
    assert given_print == fingerprint_of(engine)
    assert torch.equal(engine.head.weight, learner.embed.weight.to(torch.bfloat16))


def test_a_tied_weight_needs_one_value() -> None:
    learner, engine = Tied(), Tied()
    learner.head = torch.nn.Linear(3, 5, bias=False)
    with torch.no_grad(), pytest.raises(WeightsNotApplied, match="tied"):
        copy_weights(learner.named_parameters(), engine)
