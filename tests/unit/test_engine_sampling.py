"""Draws and logprobs of the engine, as functions of plain tensors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engines.sampling import draw, longest_common_prefix, processed_logprobs, uniforms


def one(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_temperature_scales_the_logits_and_not_the_logprobs() -> None:
    logits = torch.tensor([[3.0, 1.0, 0.0]])
    assert processed_logprobs(logits, one(0.5), None, None)[0, 0].item() == pytest.approx(
        -0.02058, abs=1e-5
    )
    greedy = processed_logprobs(logits, one(0.0), None, None)
    assert greedy[0, 0].item() == pytest.approx(-0.16985, abs=1e-5)


def test_nucleus_takes_the_smallest_set_that_reaches_its_mass() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]]))
    kept = processed_logprobs(logits, one(1.0), None, one(0.8))[0]
    assert kept[1].item() == pytest.approx(math.log(0.5 / 0.8), abs=1e-5)
    assert kept[0].item() == -math.inf
    assert processed_logprobs(logits, one(1.0), None, one(0.81))[0].isfinite().all()


def test_top_k_and_top_p_apply_in_that_order() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    # Among the first three .444, .333 and .222: the first two hold .777 of the mass.
    kept = processed_logprobs(logits, one(1.0), torch.tensor([3]), one(0.75))[0]
    assert kept.isfinite().tolist() == [True, True, False, False]


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30), min_size=2, max_size=40),
    temperature=st.floats(0.05, 5),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 50),
    u=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_inside_a_normalised_support(
    logits: list[float], temperature: float, top_p: float, top_k: int, u: float
) -> None:
    logp = processed_logprobs(
        torch.tensor([logits]), one(temperature), torch.tensor([top_k]), one(top_p)
    )
    assert logp.double().exp().sum().item() == pytest.approx(1, abs=1e-5)
    if top_k:
        assert logp.isfinite().sum() <= top_k
    token = draw(logp, one(u), None)
    assert logp[0, token].isfinite()


@settings(max_examples=30, deadline=None)
@given(u=st.floats(0, 1, exclude_max=True), shift=st.floats(-5, 5))
def test_a_draw_inverts_the_cumulative_distribution(u: float, shift: float) -> None:
    probabilities = [0.1, 0.0, 0.6, 0.3]
    logp = torch.log_softmax(torch.log(torch.tensor([probabilities])) + shift, -1)
    token = int(draw(logp, one(u), None))
    edges = [0.1, 0.1, 0.7, 1.0]
    near_an_edge = min(abs(u - e) for e in edges) < 1e-6
    assert near_an_edge or token == next(i for i, e in enumerate(edges) if u < e)


def test_greedy_rows_take_the_largest_beside_rows_that_draw() -> None:
    logp = torch.log_softmax(torch.tensor([[0.0, 2.0, 1.0]] * 2), -1)
    assert draw(logp, one(0.0, 0.0), torch.tensor([True, False])).tolist() == [1, 0]


@given(seed=st.integers(-(2**70), 2**70), count=st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_the_stream_of_a_seed_does_not_depend_on_its_length(seed: int, count: int) -> None:
    longer = uniforms(seed, count + 7)
    assert (uniforms(seed, count) == longer[:count]).all()
    assert ((longer >= 0) & (longer < 1)).all()


def test_neighbouring_seeds_are_independent() -> None:
    streams = np.stack([uniforms(seed, 400) for seed in range(40)])
    assert len(np.unique(streams)) == streams.size
    off_diagonal = np.corrcoef(streams)[~np.eye(40, dtype=bool)]
    assert abs(off_diagonal).max() < 0.25
    assert abs(np.corrcoef(streams[:, :-1].ravel(), streams[:, 1:].ravel())[0, 1]) < 0.05


@given(a=st.lists(st.integers(0, 2), max_size=8), b=st.lists(st.integers(0, 2), max_size=8))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = longest_common_prefix(np.array(a, np.int64), np.array(b, np.int64))
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
