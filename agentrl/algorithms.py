"""The algorithms of the family, by composition: a preset is a few lines of data.

Every field is one choice; `preset` fills in what is not given. docs/algorithms.md has formula,
source and advice for each.
"""

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # What the field has converged on: centred rewards, token mean, wide upper clip.
        "default": {},
        # DeepSeekMath, 2402.03300 equations 3 and 4.
        "grpo": {
            "scale": "group",
            "clip_high": 0.2,
            "aggregation": "sequence_mean",
            "kl_coef": 0.04,
            "zero_variance": "keep",
            "mismatch": "none",
        },
        # DAPO, 2503.14476 equation 8, with dynamic sampling.
        "dapo": {"scale": "group", "refill": 3.0, "mismatch": "none"},
        # Dr. GRPO, 2503.20783: no deviation, a constant divisor.
        "dr-grpo": {
            "clip_high": 0.2,
            "aggregation": "constant",
            "zero_variance": "keep",
            "mismatch": "none",
        },
        # GSPO, 2507.18071 equation 5: one ratio for the sequence, tiny clips.
        "gspo": {
            "scale": "group",
            "ratio": "sequence",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "aggregation": "sequence_mean",
            "mismatch": "none",
        },
        # CISPO, 2506.13585 equation 4: the weight is clipped from above, the gradient lives.
        "cispo": {"scale": "group", "clip": "cispo", "clip_high": 4.0, "mismatch": "none"},
        # RLOO, 2402.14740: leave-one-out baseline, plain policy gradient over whole sequences.
        "rloo": {
            "baseline": "leave_one_out",
            "clip": "none",
            "aggregation": "sequence_sum",
            "zero_variance": "keep",
            "mismatch": "none",
        },
    }
)


class AlgorithmConfig(BaseModel):
    """Which policy gradient is taken."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: str = Field("default", description="named set of the fields below; given ones win")
    baseline: Literal["group", "leave_one_out", "none"] = Field(
        "group", description="what is subtracted from a reward"
    )
    scale: Literal["none", "group", "batch"] = Field(
        "none", description="standard deviation that centred rewards are divided by"
    )
    ddof: Literal[0, 1] = Field(0, description="0: population deviation, 1: sample deviation")
    eps: float = Field(0.0, ge=0, description="added to the deviation")
    ratio: Literal["token", "sequence"] = Field(
        "token", description="level of the importance ratio; sequence: geometric mean"
    )
    clip: Literal["ratio", "cispo", "none"] = Field("ratio", description="form of the clip")
    clip_low: float = Field(0.2, ge=0, description="ratios below 1 - clip_low are clipped")
    clip_high: float = Field(0.28, ge=0, description="ratios above 1 + clip_high are clipped")
    dual_clip: float | None = Field(
        None, gt=1, description="bound c on ratio * |A| where A < 0 (1912.09729)"
    )
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = Field(
        "token_mean", description="how token losses become one number"
    )
    constant_tokens: int = Field(
        1024, ge=1, description="divisor of each trajectory under `constant`, in tokens"
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of the reference KL in the loss")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="estimator of that KL")
    proximal: Literal["recompute", "behavior"] = Field(
        "recompute", description="denominator of the ratio: learner before the step, or engine"
    )
    mismatch: Literal["none", "truncate", "mask"] = Field(
        "truncate", description="token weight between learner and engine: cut at the cap, or drop"
    )
    mismatch_cap: float = Field(2.0, gt=1, description="largest such weight")
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
        if name not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(PRESETS)}"
            raise ValueError(f"unknown preset {name!r}; {hint}")
        return {**PRESETS[name], **given}
