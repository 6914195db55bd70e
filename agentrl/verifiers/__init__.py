"""Outcome verifiers: they read the answer, never the prompt or a tool's output, and fail closed.

What a verifier can't judge (its own error, a reference that it can't read) is an invalid verdict,
never a reward.
"""

from agentrl.verifiers.answers import ChoiceMatch, ExactMatch, F1Match, NumericMatch
from agentrl.verifiers.boxes import last_boxed
from agentrl.verifiers.endpoint import ChatEndpoint
from agentrl.verifiers.json_match import JsonMatch, strict_json
from agentrl.verifiers.judge import Judge, PairwiseJudge
from agentrl.verifiers.killable import KillablePool, Reply
from agentrl.verifiers.math import MathMatch
from agentrl.verifiers.parts import FormatPart, Submitted, Weighted
from agentrl.verifiers.reward_model import RewardModel
from agentrl.verifiers.sql import LimitedSqlite, SqlDatabase, SqlReference, SqlResult
from agentrl.verifiers.unit_tests import Case, Suite, UnitTests, code_of

__all__ = [
    "Case",
    "ChatEndpoint",
    "ChoiceMatch",
    "ExactMatch",
    "F1Match",
    "FormatPart",
    "JsonMatch",
    "Judge",
    "KillablePool",
    "LimitedSqlite",
    "MathMatch",
    "NumericMatch",
    "PairwiseJudge",
    "Reply",
    "RewardModel",
    "SqlDatabase",
    "SqlReference",
    "SqlResult",
    "Submitted",
    "Suite",
    "UnitTests",
    "Weighted",
    "code_of",
    "last_boxed",
    "strict_json",
]
