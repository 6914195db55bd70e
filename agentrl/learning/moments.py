"""Mean and deviation of a few numbers: fp64, exactly rounded (`fsum`), whatever their order.

Equal numbers have deviation 0 exactly, where rounding would leave something tiny to divide by.
"""

from collections.abc import Sequence
from math import fsum, sqrt

Numbers = Sequence[float]


def mean_of(values: Numbers) -> float:
    """The mean; 0 of nothing."""
    return fsum(values) / len(values) if values else 0.0


def is_constant(values: Numbers) -> bool:
    """Whether there is nothing to tell apart: fewer than two numbers, or all equal."""
    return len(values) < 2 or min(values) == max(values)


def deviation_of(values: Numbers, ddof: int) -> float:
    """The standard deviation, of the population (`ddof` 0) or the sample (1)."""
    if is_constant(values):
        return 0.0
    mean = mean_of(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def centred(values: Numbers) -> list[float]:
    """The values minus their mean; exactly 0 where all are equal."""
    if is_constant(values):
        return [0.0] * len(values)
    mean = mean_of(values)
    return [value - mean for value in values]


def divided(values: Numbers, spread: Numbers, *, ddof: int, eps: float) -> list[float]:
    """The values over the deviation of `spread` plus `eps`; exactly 0 where it has none."""
    deviation = deviation_of(spread, ddof)
    return [value / (deviation + eps) if deviation else 0.0 for value in values]
