# SPDX-License-Identifier: Apache-2.0
"""Tables from the keys of a foreign checkpoint to ours, and the operations on their tensors.

In a name, `#` stands for a number and `*` for a word of letters, digits and underscores. Both sides
of a row have them in the same order; `#+1` is a number that is larger by 1 in the file.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

_WILDCARD = re.compile(r"#([+-]\d+)?|\*")


def same(x: "Tensor") -> "Tensor":
    """Return the tensor unchanged."""
    return x


class Row(NamedTuple):
    """One of our tensors: its name, the key or keys of the file, and the operation on theirs."""

    ours: str
    theirs: str | tuple[str, ...]
    made: "Callable[..., Tensor]" = same

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the file; the first decides whether the row applies."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    def after(self, prefix: str) -> "Row":
        """Return the row for a file in which a prefix precedes the keys."""
        return self._replace(theirs=tuple(prefix + key for key in self.keys))


Rows = tuple[Row, ...]


def rows_of(ours: str, theirs: str, names: Mapping[str, str]) -> Rows:
    """Return a row for each of our names after `ours`, and theirs after `theirs`."""
    return tuple(Row(ours + mine, theirs + other) for mine, other in names.items())


@cache
def _compiled(template: str) -> tuple[re.Pattern[str], tuple[int | None, ...]]:
    """Return the pattern of a name, and the offset of each number in it; None for a word."""
    parts, offsets, start = [], [], 0
    for wildcard in _WILDCARD.finditer(template):
        number = wildcard[0].startswith("#")
        parts += [re.escape(template[start : wildcard.start()]), r"(0|[1-9]\d*)" if number else ""]
        parts[-1] = parts[-1] or r"(\w+)"
        offsets.append(int(wildcard[1] or 0) if number else None)
        start = wildcard.end()
    return re.compile("".join((*parts, re.escape(template[start:])))), tuple(offsets)


def matched(template: str, name: str) -> tuple[str, ...] | None:
    """Return what the wildcards stand for if a name is one of the template's, else None."""
    pattern, offsets = _compiled(template)
    match = pattern.fullmatch(name)
    if match is None:
        return None
    pairs = zip(match.groups(), offsets, strict=True)
    values = [text if offset is None else str(int(text) - offset) for text, offset in pairs]
    return None if any(value.startswith("-") for value in values) else tuple(values)


def started(template: str, name: str) -> int | None:
    """Return the template's first number if a name begins like it, else None."""
    match = _compiled(template)[0].match(name)
    return int(match[1]) if match else None


def filled(template: str, values: Iterable[str]) -> str:
    """Return the template's name with these values."""
    left = iter(values)

    def value(wildcard: re.Match[str]) -> str:
        text = next(left)
        return str(int(text) + int(wildcard[1])) if wildcard[1] else text

    return _WILDCARD.sub(value, template)


def keys_of(rows: Iterable[Row], ours: str) -> tuple[str, ...]:
    """Return the keys of the file that make one of our tensors, by the first row for it."""
    for row in rows:
        if (values := matched(row.ours, ours)) is not None:
            return tuple(filled(key, values) for key in row.keys)
    return ()


def transposed(x: "Tensor") -> "Tensor":
    """Turn a matrix that multiplies from the right into a linear layer's."""
    return x.T


def scalar(x: "Tensor") -> "Tensor":
    """Return a tensor of one number without axes."""
    return x.reshape(())


def as_rows(x: "Tensor") -> "Tensor":
    """Return all axes but the last as one."""
    return x.flatten(0, -2)


def as_vector(x: "Tensor") -> "Tensor":
    """Return all axes as one."""
    return x.flatten()


def joined(*parts: "Tensor") -> "Tensor":
    """Join the outputs of several layers, such as queries, keys and values."""
    import torch

    return torch.cat(parts)


def stacked_rows(*parts: "Tensor") -> "Tensor":
    """Join vectors, such as class tokens and registers, as the rows of one matrix."""
    return joined(*map(as_rows, parts))


def part(index: int, count: int) -> "Callable[[Tensor], Tensor]":
    """Return the operation that takes one of several layers whose outputs are joined."""
    return lambda x: x.chunk(count)[index]


def scaled(x: "Tensor", factors: "Tensor") -> "Tensor":
    """Multiply the outputs of a layer, in float64: the rows of its weight, or its bias."""
    wide = factors.double()
    return (x.double() * (wide if x.dim() == 1 else wide[:, None])).to(x.dtype)


def without_key(query: "Tensor", value: "Tensor") -> "Tensor":
    """Return the bias of queries, keys and values of a layer whose keys have none."""
    import torch

    return torch.cat((query, torch.zeros_like(query), value))


def no_bias(weight: "Tensor") -> "Tensor":
    """Return the zeros that are the bias of a layer without one."""
    return weight.new_zeros(len(weight))
