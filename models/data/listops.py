# SPDX-License-Identifier: Apache-2.0
"""ListOps: nested lists of digits under MIN, MAX, MED and SM, and the digit they evaluate to.

The grammar is the benchmark's (Nangia and Bowman 2018; Tay et al. 2020 use it with up to 2,000
tokens). A list is an opening bracket with its operator, two or more arguments, and a closing
bracket; an argument is a digit or a list. MED is the median rounded down, SM the sum modulo 10.
The draws here differ in two ways. A list grows to a length that is drawn first, turning one
argument after another into a list, so that lengths are evenly distributed. And the split of an
expression follows from the expression itself, so that no split repeats an expression of another.
"""

import hashlib
import zlib
from dataclasses import dataclass, field

import numpy as np

from saccade.core.checks import check_one_of, check_within
from saccade.core.errors import SaccadeError
from saccade.core.schema import Range

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
VOCABULARY = (*(str(digit) for digit in range(10)), *OPERATORS, "]")
CLASS_NAMES = tuple(str(digit) for digit in range(10))
COUNTS = {"train": 20_000, "validation": 2_000, "test": 5_000}
_STREAMS = {"train": 0, "validation": 1, "test": 2}
_SHARE = 10  # one in this many expressions is for validation, another one for test
_CLOSE = len(VOCABULARY) - 1


@dataclass(frozen=True)
class Grammar:
    """The limits of generated expressions.

    Units:  tokens (a bracket with its operator is one), nested lists, arguments.
    Raises: SaccadeError if a limit leaves nothing to draw.
    """

    max_tokens: int = 100
    depth: int = 10
    arguments: int = 5

    def __post_init__(self) -> None:
        limits = {"max_tokens": (4, 10_000), "depth": (1, 100), "arguments": (2, 10)}
        # A list has an operator, two arguments and a bracket.
        for name, bounds in limits.items():
            check_within(f"listops: {name}", getattr(self, name), Range(*bounds))


@dataclass(frozen=True)
class Expressions:
    """Expressions, padded at the end with index 0.

    Shapes: characters [n m] int64, indices into VOCABULARY; length [n] int64; labels [n] int64;
            values [n m] int64, the value of a list at its closing bracket, elsewhere -1.
    """

    characters: np.ndarray
    length: np.ndarray
    labels: np.ndarray
    values: np.ndarray = field(repr=False)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the arrays and the vocabulary."""
        digest = hashlib.sha256(repr((self.characters.shape, VOCABULARY)).encode())
        for array in (self.characters, self.length, self.labels):
            digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return digest.hexdigest()


def listops(
    split: str, count: int | None = None, *, seed: int = 0, grammar: Grammar | None = None
) -> Expressions:
    """Return a fixed draw of one split; by default 20,000, 2,000 (validation) or 5,000 (test).

    Raises: SaccadeError if there is no such split.
    """
    check_one_of("split", split, _STREAMS)
    rng = np.random.default_rng((seed, _STREAMS[split]))
    count = COUNTS[split] if count is None else count
    return draw(rng, count, split=split, grammar=grammar or Grammar())


def draw(
    rng: np.random.Generator, count: int, *, split: str = "train", grammar: Grammar
) -> Expressions:
    """Draw new expressions of a split, different on every call and never from another split."""
    characters = np.zeros((count, grammar.max_tokens), dtype=np.int64)
    values = np.full_like(characters, -1)
    length = np.zeros(count, dtype=np.int64)
    for row in range(count):
        while True:
            tokens = _expression(rng, grammar)
            if split_of(tokens) == split:
                break
        characters[row, : len(tokens)] = tokens
        length[row] = len(tokens)
        values[row, : len(tokens)] = values_of(tokens)
    labels = values[np.arange(count), length - 1]
    return Expressions(characters, length, labels, values)


def most_bytes(max_tokens: int) -> int:
    """Return the bytes of the longest text of this many tokens.

    A list has at least two arguments, so n tokens are at most (n - 1) / 3 lists, whose operators
    have four bytes; every other token has one, and a space is between two.
    """
    return 3 * max_tokens - 2


def most_tokens(bytes_: int) -> int:
    """Return how many tokens fit into this many bytes, whatever they are."""
    return (bytes_ + 2) // 3


def as_bytes(drawn: Expressions, most: int) -> Expressions:
    """Return the expressions as text, such as `[MAX 2 9 ]`; values are at a token's last byte.

    Shapes: as in `Expressions`, with characters uint8 [n most].
    """
    characters = np.zeros((len(drawn.labels), most), dtype=np.uint8)
    values = np.full(characters.shape, -1, dtype=np.int64)
    length = np.zeros_like(drawn.length)
    for row, tokens in enumerate(drawn.length.tolist()):
        words = [VOCABULARY[code].encode() for code in drawn.characters[row, :tokens]]
        text = b" ".join(words)
        ends = np.cumsum([len(word) + 1 for word in words]) - 2
        length[row] = len(text)
        characters[row, : len(text)] = np.frombuffer(text, np.uint8)
        values[row, ends] = drawn.values[row, :tokens]
    return Expressions(characters, length, drawn.labels, values)


def split_of(tokens: list[int]) -> str:
    """Return the split of an expression, by its checksum."""
    rest = zlib.crc32(bytes(tokens)) % _SHARE
    return ("validation", "test")[rest] if rest < 2 else "train"


def values_of(tokens: list[int]) -> list[int]:
    """Return the value of the list that closes at each place, else -1; the last is the answer.

    Raises: SaccadeError if brackets and arguments do not match.
    """
    closed = [-1] * len(tokens)
    open_lists: list[tuple[int, int]] = []  # operator, and the number of values before it
    values: list[int] = []
    for place, token in enumerate(tokens):
        if token < len(CLASS_NAMES):
            values.append(token)
        elif token != _CLOSE:
            open_lists.append((token - len(CLASS_NAMES), len(values)))
        elif open_lists and len(values) > open_lists[-1][1]:
            operator, start = open_lists.pop()
            closed[place] = _apply(operator, values[start:])
            values[start:] = [closed[place]]
        else:
            raise SaccadeError(
                f"listops: the bracket at place {place} closes no list, or an empty one."
            )
    if open_lists or len(values) != 1 or not closed or closed[-1] < 0:
        raise SaccadeError(
            f"listops: found {len(values)} values and {len(open_lists)} open lists at the end, "
            "expected one list. Pass one whole expression, such as [MAX 2 9 [MIN 4 7 ] 0 ]."
        )
    return closed


def _apply(operator: int, values: list[int]) -> int:
    if operator == 0:
        return min(values)
    if operator == 1:
        return max(values)
    if operator == 2:
        ordered, half = sorted(values), len(values) // 2
        return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) // 2
    return sum(values) % 10


def _expression(rng: np.random.Generator, grammar: Grammar) -> list[int]:
    # One leaf after another becomes a list, until the next list would not fit. All random numbers
    # are drawn in one call: a call of the generator costs more than the rest of a step.
    chances = iter(rng.random(3 * grammar.max_tokens + 8).tolist())
    wanted = 4 + int(next(chances) * (grammar.max_tokens - 3))
    lists: list[list[int]] = []  # operator, then arguments: a digit as is, list i as -1 - i
    leaves: list[tuple[int, int, int]] = []  # list, place in it, depth of a list at that place
    tokens = 1
    parent, place, depth = -1, 0, 1
    while wanted - tokens >= 3:
        if lists:
            if not leaves:
                break
            chosen = int(next(chances) * len(leaves))
            leaves[chosen], leaves[-1] = leaves[-1], leaves[chosen]
            parent, place, depth = leaves.pop()
            lists[parent][place] = -1 - len(lists)
        size = 2 + int(next(chances) * (min(grammar.arguments, wanted - tokens - 1) - 1))
        kinds = int(next(chances) * 4 * 10**size)
        lists.append([10 + kinds % 4, *(kinds // 4 // 10**i % 10 for i in range(size))])
        if depth < grammar.depth:
            leaves += [(len(lists) - 1, i, depth + 1) for i in range(1, size + 1)]
        tokens += size + 1
    return _written(lists, 0)


def _written(lists: list[list[int]], index: int) -> list[int]:
    tokens = lists[index][:1]
    for child in lists[index][1:]:
        tokens += [child] if child >= 0 else _written(lists, -1 - child)
    return [*tokens, _CLOSE]
