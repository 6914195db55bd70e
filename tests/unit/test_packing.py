from math import log

import pytest
import torch
import transformers as tr
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_cases import VOCAB, tiny_model

from agentrl.errors import ConfigError
from agentrl.learning.packing import pack, packed, token_logprobs
from agentrl.learning.plan import alike, by_tokens, in_parts, lr_factor

SIZE = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
READ = [
    tr.LlamaConfig(**SIZE),
    tr.Qwen2Config(**SIZE),
    tr.Qwen3Config(**SIZE, head_dim=8),
    tr.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=64),
]
REFUSED = [
    tr.MistralConfig(**SIZE, sliding_window=8),
    tr.Gemma2Config(**SIZE, head_dim=8),
    tr.GraniteConfig(**SIZE, logits_scaling=8.0),
    tr.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=4),
    tr.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2),
]


def random_model(config: tr.PretrainedConfig) -> tr.PreTrainedModel:
    torch.manual_seed(0)
    model = tr.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model.eval()


def plain(model: tr.PreTrainedModel, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = model(input_ids=ids[None]).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("config", READ, ids=lambda c: c.model_type)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_logprobs_equal_those_of_each_row_alone(config, temperature) -> None:
    model = random_model(config)
    rows = [torch.randint(VOCAB, (n,)) for n in (5, 17, 1, 9)]
    wanted = torch.cat([plain(model, row, temperature) for row in rows])
    before = torch.cat([torch.arange(len(row)) > 0 for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    with packed(model):
        got = token_logprobs(model, torch.cat(rows), lengths, before, temperature=temperature)
    assert torch.allclose(got.logprobs, wanted, atol=1e-5)
    again = torch.cat([plain(model, row, temperature) for row in rows])
    assert torch.equal(again, wanted), "the model reads plain input again"


@pytest.mark.parametrize("config", REFUSED, ids=lambda c: c.model_type)
def test_what_packing_would_change_is_refused(config) -> None:
    with pytest.raises(ConfigError, match=r"packed|can't"):
        pack(random_model(config))


def test_a_row_does_not_see_another() -> None:
    model = pack(tiny_model())
    ids, lengths = torch.arange(9), torch.tensor([5, 4])
    wanted = torch.tensor([0, 1, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    first = token_logprobs(model, ids, lengths, wanted, temperature=1.0).logprobs
    changed = ids.clone()
    changed[2] = 31
    second = token_logprobs(model, changed, lengths, wanted, temperature=1.0).logprobs
    assert torch.equal(first[4:], second[4:])
    assert not torch.allclose(first[1:4], second[1:4])


def test_temperature_divides_the_logits() -> None:
    model = pack(tiny_model())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight[:, 0] = 1
        model.lm_head.weight.fill_(-torch.inf)
        scale = 16**-0.5  # the hidden state after the norm is (4, 0, 0, …)
        for token, logit in enumerate((3.0, 1.0, 0.0)):
            model.lm_head.weight[token] = torch.tensor([logit * scale] + [0.0] * 15)
        model.lm_head.weight[3:] = torch.tensor([-1e4] + [0.0] * 15)
    wanted = torch.tensor([False, True])
    scores = token_logprobs(model, torch.tensor([1, 0]), torch.tensor([2]), wanted, temperature=0.5)
    assert scores.logprobs.item() == pytest.approx(-0.02058, abs=1e-5)


def test_dropout_is_off() -> None:
    model = tr.AutoModelForCausalLM.from_config(
        tr.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=64)
    )
    pack(model).train()
    ids, wanted = torch.arange(8), torch.arange(8) > 0
    once, again = (
        token_logprobs(model, ids, torch.tensor([8]), wanted, temperature=1.0).logprobs
        for _ in range(2)
    )
    assert torch.equal(once, again)


LENGTHS = st.lists(st.integers(1, 50), max_size=30)


@settings(max_examples=100)
@given(lengths=LENGTHS, budget=st.integers(1, 200))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget) -> None:
    parts = by_tokens(lengths, budget)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or sum(lengths[r] for r in part) <= budget for part in parts)


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30), budget=st.integers(50, 300))
def test_micro_batches_are_as_few_as_they_can_be_and_balanced(lengths, budget) -> None:
    """One token less in the fullest, and there would be one more of them."""
    parts = by_tokens(lengths, budget)
    sums = [sum(lengths[r] for r in part) for part in parts]
    assert len(parts) <= 2 * -(-sum(lengths) // budget)
    assert len(by_tokens(lengths, max(sums))) == len(parts)
    if max(sums) > max(lengths):
        assert len(by_tokens(lengths, max(sums) - 1)) > len(parts)


@settings(max_examples=100)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=60))
def test_rows_that_attend_together_are_padded_by_at_most_a_twentieth(lengths) -> None:
    parts = alike(lengths)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    for part in parts:
        table = len(part) * max(lengths[r] for r in part)
        assert sum(lengths[r] for r in part) >= 0.95 * table - 1e-9


@settings(max_examples=100)
@given(lengths=LENGTHS, count=st.integers(1, 8))
def test_minibatches_hold_every_row_once_and_are_balanced(lengths, count) -> None:
    parts = in_parts(lengths, count)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert len(parts) == min(count, len(lengths))
    sums = [sum(lengths[r] for r in part) for part in parts]
    assert not sums or max(sums) - min(sums) <= max(lengths)


@pytest.mark.parametrize(
    ("schedule", "wanted"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_learning_rate_schedules(schedule, wanted) -> None:
    got = [lr_factor(s, schedule=schedule, warmup=2, total=6) for s in range(7)]
    assert got == pytest.approx(wanted, abs=1e-6)


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    model = pack(tiny_model())
    with torch.no_grad():
        model.lm_head.weight.zero_()
    scores = token_logprobs(
        model, torch.arange(4), torch.tensor([4]), torch.arange(4) > 0, temperature=0.7
    )
    assert scores.entropy.tolist() == pytest.approx([log(VOCAB)] * 3, abs=1e-5)
