import copy
from dataclasses import replace
from random import Random

import pytest
import torch
from learning_cases import (
    VOCAB,
    batch_of,
    gradients,
    group,
    make_learner,
    random_groups,
    tiny_model,
    trajectory,
    turn,
    weights_of,
)

from agentrl.algorithms import AlgorithmConfig
from agentrl.errors import ConfigError, NonFiniteLoss, RecordError
from agentrl.learning.batch import Batch
from agentrl.learning.packing import pack, token_logprobs
from agentrl.learning.panel import METRICS
from agentrl.types import Ending

PRESETS = ["default", "grpo", "dr-grpo", "gspo", "cispo", "sapo", "dppo", "rloo", "trl"]


def learner_for(preset: str, **section: object):
    algorithm = AlgorithmConfig(preset=preset)
    reference = tiny_model(seed=1) if algorithm.kl_coef else None
    return make_learner(algorithm, reference=reference, **section)


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, rtol=1e-5, atol=1e-6 * float(left.abs().max()))


# --- what must not change a gradient ----------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("budget", [1, 25, 60])
def test_the_micro_batch_plan_changes_no_gradient(preset: str, budget: int) -> None:
    """A budget of 1 token is one row at a time, the largest is one packed forward."""
    batch = batch_of(random_groups(), AlgorithmConfig(preset=preset))
    whole = gradients(learner_for(preset, micro_batch_tokens=10_000), batch)
    assert whole.abs().sum() > 0
    assert close(whole, gradients(learner_for(preset, micro_batch_tokens=budget), batch))


@pytest.mark.parametrize("preset", PRESETS)
def test_row_order_changes_no_gradient(preset: str) -> None:
    algorithm, draw = AlgorithmConfig(preset=preset), Random(1)
    groups = random_groups()
    shuffled = []
    for old in draw.sample(groups, len(groups)):
        order = draw.sample(range(len(old.trajectories)), len(old.trajectories))
        shuffled.append(
            group([old.trajectories[m] for m in order], [old.verdicts[m] for m in order])
        )
    first = gradients(learner_for(preset, micro_batch_tokens=40), batch_of(groups, algorithm))
    second = gradients(learner_for(preset, micro_batch_tokens=40), batch_of(shuffled, algorithm))
    assert close(first, second)


@pytest.mark.parametrize("preset", ["default", "grpo", "gspo", "rloo"])
def test_the_number_of_turns_changes_no_gradient(preset: str) -> None:
    """Same ids, same mask: which turn sampled them is bookkeeping, unless the ratio is a turn's."""
    batch = batch_of(random_groups(), AlgorithmConfig(preset=preset))
    one_turn = replace(batch, turns=batch.turns.clamp(max=0))
    assert close(gradients(learner_for(preset), batch), gradients(learner_for(preset), one_turn))


@pytest.mark.parametrize("preset", ["default", "grpo", "gspo", "dppo", "cispo"])
@pytest.mark.parametrize("garbage", [10.0, float("nan"), float("-inf"), float("inf")])
def test_garbage_at_observations_changes_no_bit(preset: str, garbage: float) -> None:
    batch = batch_of(random_groups(), AlgorithmConfig(preset=preset))

    def spoilt(values: torch.Tensor) -> torch.Tensor:
        return torch.where(batch.action_mask, values, garbage)

    dirty = replace(
        batch,
        behavior_logprobs=spoilt(batch.behavior_logprobs),
        advantages=spoilt(batch.advantages),
        versions=torch.where(batch.action_mask, batch.versions, -99),
    )
    clean, other = learner_for(preset), learner_for(preset)
    assert torch.equal(gradients(clean, batch), gradients(other, dirty))
    assert torch.equal(weights_of(clean), weights_of(other))


def test_only_logits_that_predict_an_action_have_a_gradient() -> None:
    """Prompt 3, action 2, observation 4, action 1: the mask is 0001100001."""
    member = trajectory(turn([1, 2, 3], [4, 5]), turn([6, 7, 8, 9], [10]), member=0)
    batch = batch_of([group([member, trajectory(turn([1], [2]), member=1)], [1.0, 0.0])])
    assert batch.action_mask[:10].int().tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    model, seen = pack(tiny_model()), []

    class Spy(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(hidden.shape[0])
            return super().forward(hidden)

    model.set_output_embeddings(Spy(16, VOCAB, bias=False))
    one = batch.select([0])
    token_logprobs(model, one.input_ids, one.lengths, one.action_mask, temperature=1.0)
    assert seen == [3], "the head reads the predicting positions of the three sampled tokens"


def test_changing_a_later_observation_changes_no_earlier_gradient() -> None:
    def grad(last: list[int]) -> torch.Tensor:
        member = trajectory(turn([1, 2], [3, 4]), turn(last, [5]), member=0)
        batch = batch_of([group([member, trajectory(turn([1], [2]), member=1)], [1.0, 0.0])])
        mask = batch.action_mask & (batch.turns == 0)
        return gradients(make_learner(AlgorithmConfig()), replace(batch, action_mask=mask))

    assert close(grad([6, 7]), grad([8, 9]))


def test_gradient_checkpointing_changes_no_gradient() -> None:
    batch = batch_of(random_groups())
    plain = gradients(learner_for("default"), batch)
    assert close(plain, gradients(learner_for("default", gradient_checkpointing=True), batch))


def test_the_gradient_is_that_of_the_formula() -> None:
    """Against a plain forward of each row alone, the loss written out by hand."""
    groups = random_groups(groups=2)
    batch = batch_of(groups, AlgorithmConfig(mismatch="none"))
    got = gradients(make_learner(AlgorithmConfig(mismatch="none"), max_grad_norm=1e9), batch)
    model = tiny_model()
    total, tokens = torch.zeros(()), int(batch.action_mask.sum())
    for row in range(len(batch.lengths)):
        part = batch.select([row])
        logits = model(input_ids=part.input_ids[None]).logits[0, :-1]
        logp = logits.log_softmax(-1).gather(-1, part.input_ids[1:, None])[:, 0]
        ratio = (logp - logp.detach()).exp()
        total = total - (ratio * part.advantages[1:])[part.action_mask[1:]].sum() / tokens
    total.backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert close(wanted, got)


# --- ratio, clip, versions --------------------------------------------------------------------


def test_before_any_update_the_ratio_is_exactly_one() -> None:
    learner = learner_for("default", lr=0.0)
    before = weights_of(learner)
    stats = learner.update(batch_of(random_groups()))
    assert (stats["ratio_mean"], stats["ratio_max"], stats["clip_share"]) == (1.0, 1.0, 0.0)
    assert torch.equal(before, weights_of(learner)), "learning rate 0 moves no bit"
    assert learner.version == 1
    assert stats["mismatch_max"] > 0, "the engine's logprobs of this test are invented"


def test_with_several_optimiser_steps_the_ratio_moves() -> None:
    batch = batch_of(random_groups())
    still = learner_for("default", lr=0.0, epochs=2, minibatches=2).update(batch)
    assert still["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    moved = learner_for("default", lr=0.05, epochs=2, minibatches=2).update(batch)
    assert moved["ratio_max"] > 1.01
    assert moved["clip_share"] > 0


def test_the_engines_own_logprobs_leave_no_mismatch() -> None:
    learner = learner_for("default", lr=0.0)
    batch = batch_of(random_groups())
    scores = []
    for row in range(len(batch.lengths)):
        scores += [float("nan"), *learner.logprobs(batch.select([row]).input_ids.tolist(), 1.0)]
    stats = learner.update(replace(batch, behavior_logprobs=torch.tensor(scores)))
    assert stats["mismatch_max"] < 1e-5
    assert stats["mismatch_k3"] == pytest.approx(0, abs=1e-9)


def test_logprobs_of_a_probe() -> None:
    learner = make_learner(AlgorithmConfig())
    logits = tiny_model()(input_ids=torch.tensor([[1, 2, 3]])).logits[0, :-1] / 0.7
    wanted = logits.log_softmax(-1)[torch.arange(2), torch.tensor([2, 3])]
    assert learner.logprobs([1, 2, 3], 0.7) == pytest.approx(wanted.tolist(), abs=1e-5)
    assert learner.logprobs([1], 1.0) == []


def test_an_update_raises_the_probability_of_what_paid() -> None:
    good = trajectory(turn([1, 2], [3, 4]), member=0)
    bad = trajectory(turn([1, 2], [5, 6]), member=1)
    learner = make_learner(AlgorithmConfig(mismatch="none"), lr=1e-2)
    before = [sum(learner.logprobs(t.token_ids, 1.0)[1:]) for t in (good, bad)]
    for _ in range(3):
        learner.update(batch_of([group([good, bad], [1.0, 0.0])]))
    after = [sum(learner.logprobs(t.token_ids, 1.0)[1:]) for t in (good, bad)]
    assert after[0] > before[0] and after[1] < before[1]


# --- nothing to learn, nothing finite ---------------------------------------------------------


def everything_masked() -> Batch:
    cut = [trajectory(turn([1], [2, 3]), member=m, ending=Ending.CUT_OFF) for m in range(2)]
    return batch_of([group(cut, [1.0, 0.0])], AlgorithmConfig(mask_truncated=True))


@pytest.mark.parametrize("batch", [everything_masked(), batch_of([])], ids=["masked", "empty"])
def test_a_batch_without_a_trained_token_changes_nothing(batch: Batch, caplog) -> None:
    learner = make_learner(AlgorithmConfig(mask_truncated=True), weight_decay=0.1, lr=0.1)
    learner.update(batch_of(random_groups()))  # AdamW has momentum now
    before, state = weights_of(learner), copy.deepcopy(learner.optimizer.state_dict())
    stats = learner.update(batch)
    assert torch.equal(before, weights_of(learner))
    assert str(state) == str(learner.optimizer.state_dict())
    assert set(stats) == set(METRICS)
    assert stats["loss"] == 0 and all(v == 0 for v in stats.values())
    assert len(caplog.records) == 1
    assert learner.version == 2


def test_constant_groups_move_nothing_either() -> None:
    constant = [group([trajectory(turn([1], [2]), member=m) for m in range(3)], [0.7] * 3)]
    algorithm = AlgorithmConfig(zero_variance="keep")
    learner = make_learner(algorithm, weight_decay=0.1, lr=0.1)
    learner.update(batch_of(random_groups(), algorithm))
    before = weights_of(learner)
    stats = learner.update(batch_of(constant, algorithm))
    assert torch.equal(before, weights_of(learner)) and stats["grad_norm"] == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stops_before_the_weights_change(value: float) -> None:
    learner = make_learner(AlgorithmConfig())
    batch = batch_of(random_groups())
    before = weights_of(learner)
    advantages = batch.advantages.clone()
    advantages[batch.action_mask.nonzero()[0]] = value
    with pytest.raises(NonFiniteLoss, match="the weights are as before"):
        learner.update(replace(batch, advantages=advantages))
    assert torch.equal(before, weights_of(learner))
    assert learner.version == 0
    assert learner.update(batch)["grad_norm"] > 0, "and the learner goes on"


def test_metrics_are_flat_and_finite() -> None:
    stats = learner_for("grpo").update(batch_of(random_groups(), AlgorithmConfig(preset="grpo")))
    assert set(stats) == set(METRICS)
    assert all(isinstance(v, float) and v == v and abs(v) < 1e9 for v in stats.values())
    assert stats["kl_ref"] > 0 and stats["entropy"] > 0 and stats["action_tokens"] > 0
    assert stats["lr"] == pytest.approx(1e-3)


# --- reference, logprobs, schedule ------------------------------------------------------------


def test_a_reference_is_held_only_for_a_kl() -> None:
    assert make_learner(AlgorithmConfig(), reference=tiny_model(1)).reference is None
    batch = batch_of(random_groups())
    with pytest.raises(ConfigError, match="no reference"):
        make_learner(AlgorithmConfig(kl_coef=0.1)).update(batch)


def test_the_policy_itself_as_reference_costs_nothing() -> None:
    algorithm = AlgorithmConfig(kl_coef=0.5, mismatch="none")
    stats = make_learner(algorithm, reference=tiny_model()).update(batch_of(random_groups()))
    assert stats["kl_ref"] == pytest.approx(0.0, abs=1e-9)


def test_the_reference_follows_the_policy_every_so_many_steps() -> None:
    """Algorithm 1 of 2402.03300: after the renewal the KL starts from 0 again."""
    algorithm = AlgorithmConfig(preset="grpo-iterative", reference_every=2, mismatch="none")
    learner = make_learner(algorithm, reference=tiny_model(1), lr=1e-2)
    kl = [learner.update(batch_of(random_groups(), algorithm))["kl_ref"] for _ in range(5)]
    assert [value == pytest.approx(0, abs=1e-9) for value in kl] == [
        False, False, True, False, True,
    ]  # fmt: skip


def test_reference_logprobs_in_the_batch_are_taken_as_they_are() -> None:
    algorithm = AlgorithmConfig(preset="grpo")
    batch = batch_of(random_groups(), algorithm)
    learner = make_learner(algorithm, reference=tiny_model(1))
    known = learner._reference(batch)
    offline = make_learner(algorithm)
    assert torch.equal(
        gradients(learner, batch), gradients(offline, replace(batch, ref_logprobs=known))
    )


def test_the_kl_in_the_reward_goes_through_the_baseline() -> None:
    """Leave-one-out over r_i - beta * sum_t log(policy / reference)."""
    algorithm = AlgorithmConfig(preset="rloo", kl_coef=0.1)
    plain = AlgorithmConfig(preset="rloo")
    groups = random_groups(groups=2)
    batch = batch_of(groups, algorithm)
    reference = tiny_model(1)
    policy, other = make_learner(plain), make_learner(plain, model=reference)
    shaped = []
    for g in groups:
        rewards = []
        for t, v in zip(g.trajectories, g.verdicts, strict=True):
            own, ref = (x.logprobs(t.token_ids, 1.0) for x in (policy, other))
            gaps = [a - b for a, b, m in zip(own, ref, t.action_mask[1:], strict=True) if m]
            rewards.append(v.reward - 0.1 * sum(gaps))
        shaped.append(group(g.trajectories, rewards))
    wanted = gradients(make_learner(plain), batch_of(shaped, plain))
    got = gradients(make_learner(algorithm, reference=tiny_model(1)), batch)
    assert close(wanted, got)


@pytest.mark.parametrize("fields", [{}, {"proximal": "behavior", "mismatch": "none"}])
def test_logprobs_that_are_needed_and_missing_are_refused(fields: dict) -> None:
    batch = batch_of(random_groups())
    holes = torch.full_like(batch.behavior_logprobs, float("nan"))
    with pytest.raises(RecordError, match="without the engine's logprobs"):
        make_learner(AlgorithmConfig(**fields)).update(replace(batch, behavior_logprobs=holes))
    stats = make_learner(AlgorithmConfig(mismatch="none")).update(
        replace(batch, behavior_logprobs=holes)
    )
    assert stats["grad_norm"] > 0 and stats["mismatch_k3"] == 0


def test_the_learning_rate_follows_the_version() -> None:
    learner = learner_for("default", lr=1e-3, schedule="linear", warmup_steps=2, total_steps=6)
    got = [learner.update(batch_of(random_groups()))["lr"] for _ in range(6)]
    assert got == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    with pytest.raises(ConfigError, match="total_steps"):
        learner_for("default", schedule="cosine")


def test_float16_weights_are_refused_and_bfloat16_gets_masters() -> None:
    with pytest.raises(ConfigError, match="float16"):
        make_learner(AlgorithmConfig(), model=tiny_model().half())
    learner = make_learner(AlgorithmConfig(), model=tiny_model().bfloat16(), lr=1e-6)
    before = weights_of(learner)
    stats = learner.update(batch_of(random_groups()))
    assert stats["ratio_max"] == 1.0
    moved = (weights_of(learner) != before).float().mean()
    assert before.dtype is torch.float32 and moved > 0.5, "small steps are not rounded away"


def test_published_weights_are_the_parameters_once_each() -> None:
    learner = make_learner(AlgorithmConfig())
    names = [name for name, _ in learner.weights()]
    assert names == [name for name, _ in tiny_model().named_parameters()]
    assert len(set(names)) == len(names)
