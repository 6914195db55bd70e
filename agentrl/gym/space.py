"""A Gymnasium space of texts."""

from typing import Any

import numpy as np
from gymnasium.spaces import Space

_LONGEST_SAMPLE = 64


class TextSpace(Space[str]):
    """Any text of at most `max_length` characters: blanks, line breaks and all of Unicode.

    (Gymnasium's own `Text` takes only the characters of a given set, by default no blanks.)
    Lone surrogates are no text: nothing can encode them.
    """

    def __init__(
        self, max_length: int = 1 << 24, seed: int | np.random.Generator | None = None
    ) -> None:
        if max_length < 0:
            raise ValueError("max_length must be at least 0")
        self.max_length = max_length
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Texts have no fixed size."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A short random text, half of it ASCII. Raises ValueError for a mask: there is none."""
        if mask is not None or probability is not None:
            raise ValueError("TextSpace can't be masked")
        length = int(self.np_random.integers(0, min(self.max_length, _LONGEST_SAMPLE) + 1))
        return "".join(self._character() for _ in range(length))

    def contains(self, x: Any) -> bool:
        """Whether `x` is such a text."""
        if not isinstance(x, str) or len(x) > self.max_length:
            return False
        return not any("\ud800" <= character <= "\udfff" for character in x)

    def __repr__(self) -> str:
        return f"TextSpace(max_length={self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace) and other.max_length == self.max_length

    def __hash__(self) -> int:
        return hash(("TextSpace", self.max_length))

    def _character(self) -> str:
        if self.np_random.random() < 0.5:
            return chr(int(self.np_random.integers(0x20, 0x7F)))
        code = int(self.np_random.integers(0, 0x110000 - 0x800))
        return chr(code if code < 0xD800 else code + 0x800)
