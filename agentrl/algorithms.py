"""The algorithms of the family, by composition: a preset is a few lines of data.

Every field is one choice; `preset` fills in what is not given. docs/algorithms.md has formula,
source and advice for each.
"""

import difflib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Preset = Mapping[str, Any]


def _over(base: Preset, **changes: Any) -> Preset:
    return MappingProxyType({**base, **changes})


# DeepSeekMath, 2402.03300 equations 3 and 4 (outcome supervision).
_GRPO: Preset = MappingProxyType(
    {
        "scale": "group",
        "clip_high": 0.2,
        "aggregation": "sequence_mean",
        "kl_coef": 0.04,
        "kl_form": "k3",
        "mismatch": "none",
        "zero_variance": "keep",
    }
)
# What the token-mean code bases share when nothing is set: narrow clip, no KL, no correction.
_TOKEN_MEAN = _over(_GRPO, aggregation="token_mean", kl_coef=0.0)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        # What the field has converged on: centred rewards, token mean, wide upper clip.
        "default": MappingProxyType({}),
        "grpo": _GRPO,
        # The same paper, section 4.1.3: one reward for each turn.
        "grpo-process": _over(_GRPO, baseline="steps"),
        # Its algorithm 1: the reference follows the policy, and a tenth of the data is replayed.
        "grpo-iterative": _over(_GRPO, reference_every=400, replay_share=0.1, mismatch="truncate"),
        # The same objective on recorded groups: the ratio is to the policy that sampled them.
        "grpo-offline": _over(_GRPO, proximal="behavior"),
        # GiGPO, 2505.10978: the outcome, and returns compared where turns share a state.
        "gigpo": _over(
            _TOKEN_MEAN,
            scale="none",
            turn_credit="states",
            discount=0.95,
            kl_coef=0.01,
        ),
        # MT-GRPO, 2505.11821: turn rewards up to the last turn, the outcome everywhere.
        "mt-grpo": _over(_GRPO, ddof=1, kl_coef=0.0, turn_credit="rewards"),
        # GDPO, 2601.05242: every part of the reward is normalised alone.
        "gdpo": _over(_GRPO, ddof=1, kl_coef=0.0, aggregation="token_mean", reward="parts"),
        # DAPO, 2503.14476 equations 8 to 13, with dynamic sampling and soft overlong punishment.
        "dapo": MappingProxyType(
            {"scale": "group", "refill": 3.0, "length_tokens": (20480, 4096), "mismatch": "none"}
        ),
        # Dr. GRPO, 2503.20783: no deviation, a constant divisor.
        "dr-grpo": _over(_TOKEN_MEAN, scale="none", aggregation="constant"),
        # GSPO, 2507.18071 equation 5: one ratio for the sequence, tiny clips.
        "gspo": _over(_GRPO, ratio="sequence", clip_low=3e-4, clip_high=4e-4, kl_coef=0.0),
        # CISPO, 2506.13585 equation 4: the weight is cut at 5, the gradient lives.
        "cispo": _over(_TOKEN_MEAN, clip="cispo", clip_low=1.0, clip_high=4.0),
        # SAPO, 2511.20347: a soft gate, with its temperatures for A < 0 and A > 0.
        "sapo": _over(_GRPO, clip="sapo", clip_low=1.05, clip_high=1.0, kl_coef=0.0),
        # DPPO with total variation: masks by difference of probabilities, against the engine.
        "dppo": _over(_TOKEN_MEAN, scale="none", clip="difference", proximal="behavior"),
        # PPO, 1707.06347, with a value head, 1506.02438, and its KL in the reward.
        "ppo": _over(
            _TOKEN_MEAN,
            baseline="value",
            scale="batch",
            eps=1e-8,
            ddof=1,
            kl_coef=0.05,
            kl_form="k1_reward",
        ),
        # RLOO, 2402.14740: leave-one-out baseline, plain policy gradient of whole sequences.
        "rloo": _over(
            _TOKEN_MEAN,
            scale="none",
            baseline="leave_one_out",
            clip="none",
            aggregation="sequence_sum",
            kl_form="k1_reward",
        ),
        # REINFORCE++, 2501.03262 equation 10 without KL, and its variant with a group baseline.
        "reinforce++": _over(_TOKEN_MEAN, baseline="batch", scale="batch"),
        "reinforce++-baseline": _over(_TOKEN_MEAN, scale="centred", kl_form="k2"),
        # Rejection fine-tuning, 2402.03300 appendix A.1.3: the likelihood of what passed.
        "rft": _over(
            _GRPO,
            objective="likelihood",
            reward="passed",
            baseline="none",
            scale="none",
            clip="none",
            kl_coef=0.0,
        ),
        # DPO, 2305.18290 equation 7, on every pair of a group that earned unequally.
        "dpo": _over(
            _GRPO,
            objective="preference",
            scale="none",
            clip="none",
            kl_coef=0.1,
            zero_variance="drop",
        ),
        # Group statistics as other code bases take them.
        "trl": _over(
            _TOKEN_MEAN, ddof=1, eps=1e-4, mismatch="sequence_mask", mismatch_bounds=(0.0, 3.0)
        ),
        "verl": _over(_TOKEN_MEAN, ddof=1, eps=1e-6, dual_clip=3.0),
        "openrlhf": _over(_TOKEN_MEAN, ddof=1, eps=1e-9),
        "nemo": _over(_TOKEN_MEAN, baseline="leave_one_out", scale="others", ddof=1, eps=1e-6),
    }
)


class AlgorithmConfig(BaseModel):
    """Which policy gradient is taken.

    Raises pydantic's ValidationError for an unknown preset (naming the nearest) and for choices
    that contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preset: str = Field("default", description="named set of the fields below; given ones win")
    objective: Literal["policy", "likelihood", "preference"] = Field(
        "policy",
        description="advantage times ratio, advantage times log-probability, or the preference of "
        "each better member of a group over each worse one (kl_coef is its beta)",
    )
    reward: Literal["total", "parts", "passed"] = Field(
        "total",
        description="what is read of a verdict: its reward, each part of it normalised alone and "
        "summed, or 1 for a pass and 0 for anything else",
    )
    part_weights: Mapping[str, float] = Field(
        default_factory=dict, description="weight of a part of the reward by name (others: 1)"
    )
    baseline: Literal["group", "leave_one_out", "batch", "steps", "value", "none"] = Field(
        "group",
        description="mean subtracted from a reward; steps: process supervision by step rewards; "
        "value: a learned value of each token (PPO)",
    )
    scale: Literal["none", "group", "others", "batch", "centred"] = Field(
        "none",
        description="standard deviation that divides: of the group, the other members, all "
        "rewards of the batch, or all centred rewards of it",
    )
    ddof: Literal[0, 1] = Field(0, description="0: population deviation, 1: sample deviation")
    eps: float = Field(0.0, ge=0, description="added to the deviation")
    turn_credit: Literal["none", "states", "rewards"] = Field(
        "none",
        description="added to a turn's advantage: returns compared where turns of a group share "
        "a state, or step rewards compared turn by turn",
    )
    turn_coef: float = Field(1.0, ge=0, description="weight of that credit")
    discount: float = Field(
        1.0,
        gt=0,
        le=1,
        description="of returns: a turn with turn_credit states, a token with baseline value",
    )
    gae_decay: float = Field(
        0.95, ge=0, le=1, description="lambda of baseline value: 0 trusts the value, 1 the outcome"
    )
    value_coef: float = Field(0.1, ge=0, description="weight of the value's loss beside the policy")
    ratio: Literal["token", "turn", "sequence", "sequence_token"] = Field(
        "token", description="level of the importance ratio, a geometric mean above token level"
    )
    clip: Literal["ratio", "cispo", "sapo", "difference", "none"] = Field(
        "ratio", description="what holds an update back"
    )
    clip_low: float = Field(
        0.2,
        ge=0,
        description="ratio, cispo: bound 1 - low; difference: probability; sapo: temperature, A<0",
    )
    clip_high: float = Field(
        0.28,
        ge=0,
        description="ratio, cispo: bound 1 + high; difference: probability; sapo: temperature, A>0",
    )
    dual_clip: float | None = Field(
        None, gt=1, description="upper bound of the ratio where A < 0, with `ratio` (1912.09729)"
    )
    aggregation: Literal[
        "token_mean", "sequence_mean", "prompt_mean", "sequence_sum", "constant"
    ] = Field("token_mean", description="how token losses become one number")
    length_tokens: tuple[int, int] = Field(
        (1024, 0),
        description="L, c: `constant` divides by L action tokens; beyond L - c of them the reward "
        "falls to -1 at L (c = 0: it does not)",
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the reference (0: none)")
    kl_form: Literal["k1", "k2", "k3", "k3_corrected", "k1_reward"] = Field(
        "k3_corrected",
        description="its estimator in the loss, k3 times the ratio for the true gradient, or k1 "
        "taken from the reward",
    )
    reference_every: int = Field(
        0, ge=0, description="steps after which the policy becomes the reference (0: never)"
    )
    replay_share: float = Field(
        0.0, ge=0, lt=1, description="groups of earlier steps in a batch, as a share of the new"
    )
    proximal: Literal["recompute", "behavior"] = Field(
        "recompute", description="denominator of the ratio: learner before the step, or engine"
    )
    mismatch: Literal[
        "none", "truncate", "mask", "sequence_truncate", "sequence_mask", "geometric_mask",
        "sequence_geometric_mask", "negative_geometric_mask",
    ] = Field(
        "truncate",
        description="weight of learner against engine: cut at the cap, or dropped outside the "
        "bounds, by token or by the trajectory's product; a turn or trajectory dropped by its "
        "geometric mean",
    )  # fmt: skip
    mismatch_bounds: tuple[float, float] = Field(
        (0.0, 2.0), description="floor and cap of that weight"
    )
    entropy_coef: float = Field(0.0, description="entropy bonus")
    mask_truncated: bool = Field(
        False, description="truncated episodes count in the baseline, not in the loss"
    )
    zero_variance: Literal["keep", "drop"] = Field(
        "drop", description="what happens to groups whose rewards are all equal"
    )
    refill: float = Field(
        1.0, ge=1, description="groups taken at most to replace dropped ones, as a multiple"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        name = given.get("preset", "default")
        if not isinstance(name, str) or name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(PRESETS)}"
            raise ValueError(f"unknown preset {name!r}; {hint}")
        return {**PRESETS[name], **given}

    @model_validator(mode="after")
    def _choices_agree(self) -> Self:
        if broken := "; ".join(self._contradictions()):
            raise ValueError(broken)
        return self

    def _contradictions(self) -> Iterator[str]:
        floor, cap = self.mismatch_bounds
        length, buffer = self.length_tokens
        if not 0 <= floor < cap:
            yield "mismatch_bounds: the floor must be at least 0 and below the cap"
        if length < 1 or not 0 <= buffer <= length:
            yield "length_tokens: L must be above 0, and c between 0 and L"
        if buffer and (self.baseline == "steps" or self.reward != "total"):
            yield "baseline steps and reward parts or passed go without an overlong buffer"
        if self.dual_clip is not None and self.clip != "ratio":
            yield "dual_clip goes with clip ratio"
        if self.clip == "sapo" and not (self.clip_low and self.clip_high):
            yield "clip sapo needs temperatures clip_low and clip_high above 0"
        if self.objective != "policy" and (self.clip != "none" or self.ratio != "token"):
            yield f"objective {self.objective} has no ratio: set clip none and ratio token"
        if self.objective == "preference":
            yield from self._contradictions_of_preference()
        if self.reference_every and not self.kl_coef:
            yield "reference_every renews a reference that only kl_coef above 0 reads"
        yield from self._contradictions_of_advantages()

    def _contradictions_of_preference(self) -> Iterator[str]:
        if not self.kl_coef or self.kl_form == "k1_reward":
            yield "objective preference needs kl_coef above 0, its beta, and no kl_form k1_reward"
        ranks = self.baseline == "group" and self.scale == "none" and self.turn_credit == "none"
        if not ranks or self.reward == "parts":
            yield (
                "objective preference ranks by reward: set baseline group, scale none, no "
                "turn_credit, and reward total or passed"
            )
        if self.mismatch != "none" or self.proximal == "behavior":
            yield "objective preference reads no engine: set mismatch none and proximal recompute"

    def _contradictions_of_advantages(self) -> Iterator[str]:
        local = self.baseline in ("group", "leave_one_out") and self.scale in ("none", "group")
        if self.baseline == "steps" and self.scale not in ("none", "group"):
            yield "baseline steps goes with scale none or group"
        if self.reward == "parts" and not (local and self.turn_credit == "none"):
            yield "reward parts goes with baseline group, scale none or group, and no turn_credit"
        if self.turn_credit != "none" and not local:
            yield "turn_credit goes with baseline group or leave_one_out, and scale none or group"
        if self.reward != "total" and self.baseline == "steps":
            yield "baseline steps reads step rewards: set reward total"
        if self.scale == "others" and self.baseline != "leave_one_out":
            yield "scale others goes with baseline leave_one_out"
        if self.baseline == "value" and self.scale not in ("none", "batch"):
            yield "baseline value goes with scale none, or batch to whiten over tokens"
        if self.baseline == "value" and (self.reward == "parts" or self.objective != "policy"):
            yield "baseline value goes with objective policy, and reward total or passed"
        if self.baseline in ("batch", "none", "value") and self.zero_variance == "drop":
            yield f"baseline {self.baseline} learns from constant groups: set zero_variance keep"
        linear = self.scale == "none" and self.baseline in ("group", "leave_one_out", "none")
        plain = self.baseline == "value" or (linear and self.reward != "parts")
        if self.kl_coef and self.kl_form == "k1_reward" and not plain:
            yield (
                "kl_form k1_reward changes rewards that were already divided: set scale none "
                "and baseline group, leave_one_out or none, or baseline value"
            )
