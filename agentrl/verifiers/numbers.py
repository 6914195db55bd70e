"""Numbers in text, by stated rules.

A number is an optional sign (also a typographic minus), an optional currency sign, digits with or
without commas between groups of three, an optional fraction and exponent, an optional percent
sign. It stands apart from letters: "x12" names something, "12x" can't be read. Fractions, roots
and powers are no numbers here.
"""

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

_SIGN = "[-+−–﹣－]"
_CURRENCY = r"\\?[$€£¥]"
_DIGITS = r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\.)\.\d+"
_NUMBER = re.compile(
    rf"(?<!\w)(?<!\d[.,])(?P<sign>{_SIGN}?)(?:{_CURRENCY}\s?)?(?P<late>{_SIGN}?)"
    rf"(?P<digits>(?>(?:{_DIGITS})(?:[eE][-+−]?\d+)?))(?P<glued>\w|[.,]\d)?"
    r"(?P<percent>\s?\\?%|\s(?:percent|per\ cent)\b)?"
)
_SEPARATOR = re.compile(r"(?:[\s,;|/&()\[\]{}]|\b(?:or|and|to|either)\b)*", re.IGNORECASE)

_HARMLESS = "approx|quad|qquad|[Rr]ightarrow|implies|to|therefore|l?dots|left|Big|big"
_BEFORE = re.compile(
    r"[+*/^±√<≤≥×·÷]$|(?<![=-])>$|[\d)}]\s*[-−–]$|[-−]$"
    rf"|\\(?!(?:{_HARMLESS})\b)[A-Za-z]+\s*\{{?$"
)
_AFTER = re.compile(r"\s*(?:[+*/^±√<>≤≥×·÷\\]|[-−–]\s*[\d(])")

_MARKUP = (
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf|boldsymbol|mbox)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"(?<=\d)(?:\{,\}|\\[,!])(?=\d{3})"), ","),
    (re.compile(r"\\[,;:! ()\[\]]|\\\\|~|\$\$"), " "),
    (re.compile(r"(?m)^[ \t]*[-*+•][ \t]+"), ""),
    (re.compile(r"(?<![\w)*])(\*{1,3}|_{1,2}|`)(?=\S)([^*_`\n]+?)(?<=\S)\1(?![\w(*])"), r"\2"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number where it stands; `value` None: it can't be read (12x, 1.2.3, part of a sum)."""

    value: Decimal | None
    percent: bool
    start: int
    end: int

    def equals(self, other: "Number", tolerance: Decimal) -> bool:
        """Whether both are the same number, `tolerance` (absolute) apart at most.

        A percentage stands for itself and for its hundredth (13.2% is 13.2 and 0.132), except
        beside another percentage.
        """
        if self.value is None or other.value is None:
            return False
        if self.percent == other.percent:
            return abs(self.value - other.value) <= tolerance
        percent, plain = (self, other) if self.percent else (other, self)
        assert percent.value is not None and plain.value is not None, "checked above"
        readings = (percent.value, percent.value / 100)
        return any(abs(r - plain.value) <= tolerance for r in readings)


def numbers_in(text: str) -> list[Number]:
    """The numbers of a text in order, those included that can't be read."""
    return [_read(text, match) for match in _NUMBER.finditer(text)]


def whole_number(text: str) -> Number | None:
    """The number that the whole text is; None if it holds anything else."""
    stripped = text.strip()
    found = numbers_in(stripped)
    if len(found) != 1 or found[0].value is None:
        return None
    return found[0] if (found[0].start, found[0].end) == (0, len(stripped)) else None


def final_number(text: str) -> Number | None:
    """The last number of a text; None if there is none, or the text only lists numbers there.

    Two different numbers with nothing but "or", "and", commas or space between them are a hedge
    or a list; both are no answer.
    """
    plain = without_markup(text)
    found = numbers_in(plain)
    if not found or found[-1].value is None:
        return None
    last = found[-1]
    if len(found) > 1 and not found[-2].equals(last, Decimal(0)):
        between = plain[found[-2].end : last.start]
        if _SEPARATOR.fullmatch(between):
            return None
    return last


def only_number(text: str) -> Number | None:
    """The one number of a box, which may name a variable or a unit beside it, but nothing more."""
    plain = without_markup(text)
    found = numbers_in(plain)
    bare = plain.replace("\\%", "").replace("\\$", "")
    if len(found) != 1 or found[0].value is None or set("\\!") & set(bare):
        return None
    return found[0]


def without_markup(text: str) -> str:
    """The text without Markdown bullets and emphasis, LaTeX text wrappers and LaTeX spaces."""
    for pattern, plain in _MARKUP:
        text = pattern.sub(plain, text)
    return text


def _read(text: str, match: re.Match[str]) -> Number:
    percent = match["percent"] is not None
    end = match.end() if percent else match.end("digits")
    return Number(value=_value(text, match), percent=percent, start=match.start(), end=end)


def _value(text: str, match: re.Match[str]) -> Decimal | None:
    before = text[max(0, match.start() - 40) : match.start()].rstrip()
    if match["glued"] or (match["sign"] and match["late"]):
        return None
    if _BEFORE.search(before) or _AFTER.match(text, match.end()):
        return None
    try:
        value = Decimal(match["digits"].replace(",", "").replace("−", "-"))
    except InvalidOperation:
        return None
    negative = (match["sign"] or match["late"] or "+") != "+"
    return -value if negative else value
