"""Outcome verifiers: they read the answer, never the prompt or a tool's output, and fail closed."""

from agentrl.verifiers.answers import ExactMatch, NumericMatch, last_boxed, numbers_in

__all__ = ["ExactMatch", "NumericMatch", "last_boxed", "numbers_in"]
