"""What the generated exercises are made of: each docstring is the task, each body the solution.

A pipeline's solution is these functions' own source, so what is asked, what is expected and what
the oracle writes can't drift apart. `{n}` in a docstring is the number that the exercise draws.
"""


def keep_above(items: list[int], n: int) -> list[int]:
    """keep the numbers that are larger than {n}, in order"""
    return [x for x in items if x > n]


def drop_multiples(items: list[int], n: int) -> list[int]:
    """drop the numbers that are divisible by {n}"""
    return [x for x in items if x % n != 0]


def multiply(items: list[int], n: int) -> list[int]:
    """multiply every number by {n}"""
    return [x * n for x in items]


def rotate_left(items: list[int], n: int) -> list[int]:
    """move the first item to the end, {n} times over (an empty list stays empty)"""
    turn = n % len(items) if items else 0
    return items[turn:] + items[:turn]


def every_nth(items: list[int], n: int) -> list[int]:
    """keep the items at indexes 0, {n}, 2*{n} and so on"""
    return items[::n]


def window_sums(items: list[int], n: int) -> list[int]:
    """replace the list by the sums of all its windows of {n} neighbours, from left to right"""
    return [sum(items[i : i + n]) for i in range(len(items) - n + 1)]


def drop_repeats(items: list[int], n: int) -> list[int]:
    """keep only the first occurrence of each number"""
    return list(dict.fromkeys(items))


def running_sums(items: list[int], n: int) -> list[int]:
    """replace each number by the sum of all numbers up to and including it"""
    out: list[int] = []
    for x in items:
        out.append(x + (out[-1] if out else 0))
    return out


def differences(items: list[int], n: int) -> list[int]:
    """replace the list by the differences between each number and the one before it"""
    return [items[i] - items[i - 1] for i in range(1, len(items))]


def sort_by_remainder(items: list[int], n: int) -> list[int]:
    """sort by the remainder modulo {n}, keeping the order of numbers with the same remainder"""
    return sorted(items, key=lambda x: x % n)


def total(items: list[int], n: int) -> int:
    """return the sum (0 for an empty list)"""
    return sum(items)


def largest(items: list[int], n: int) -> int:
    """return the largest number (0 for an empty list)"""
    return max(items, default=0)


def alternating_sum(items: list[int], n: int) -> int:
    """return first minus second plus third and so on (0 for an empty list)"""
    return sum(items[::2]) - sum(items[1::2])


def remainders(items: list[int], n: int) -> dict[int, int]:
    """return a dict from each remainder modulo {n} that occurs to how many numbers have it"""
    out: dict[int, int] = {}
    for x in items:
        out[x % n] = out.get(x % n, 0) + 1
    return out


def as_is(items: list[int], n: int) -> list[int]:
    """return the list"""
    return items


def shift_letters(text: str, n: int) -> str:
    """move every letter a-z forward by {n} in the alphabet, from z on to a; keep the blanks"""
    return "".join(c if c == " " else chr((ord(c) - 97 + n) % 26 + 97) for c in text)


def drop_every_nth(text: str, n: int) -> str:
    """drop every {n}th character (the {n}th, the one {n} later, and so on)"""
    return "".join(c for i, c in enumerate(text, 1) if i % n != 0)


def reverse_words(text: str, n: int) -> str:
    """reverse the letters of every word, keeping the words' order, with one blank between words"""
    return " ".join(word[::-1] for word in text.split())


def run_lengths(text: str, n: int) -> list[tuple[str, int]]:
    """return a list of tuples (character, length) of the runs that are at least {n} long"""
    out: list[tuple[str, int]] = []
    start = 0
    for i in range(1, len(text) + 1):
        if i == len(text) or text[i] != text[start]:
            if i - start >= n:
                out.append((text[start], i - start))
            start = i
    return out


def common_letters(text: str, n: int) -> list[str]:
    """return the {n} most frequent letters, most frequent first, equals in alphabetical order"""
    letters = [c for c in text if c != " "]
    return sorted(set(letters), key=lambda c: (-letters.count(c), c))[:n]


def longest_distinct(text: str, n: int) -> int:
    """return the length of the longest substring without any character more than {n} times"""
    best = start = 0
    counts: dict[str, int] = {}
    for i, c in enumerate(text):
        counts[c] = counts.get(c, 0) + 1
        while counts[c] > n:
            counts[text[start]] -= 1
            start += 1
        best = max(best, i - start + 1)
    return best


ARITHMETIC = ((" + {n}", "add {n}"), (" - {n}", "subtract {n}"), (" * {n}", "multiply by {n}"))
ON_LISTS = (
    keep_above, drop_multiples, multiply, rotate_left, every_nth, window_sums, drop_repeats,
    running_sums, differences, sort_by_remainder,
)  # fmt: skip
FROM_LISTS = (total, largest, alternating_sum, remainders, as_is)
ON_TEXTS = (shift_letters, drop_every_nth, reverse_words)
FROM_TEXTS = (run_lengths, common_letters, longest_distinct)
