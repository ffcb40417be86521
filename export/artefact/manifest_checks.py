# SPDX-License-Identifier: Apache-2.0
"""Readers of JSON files beside artefacts, and checks that apply to every family."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from saccade.core.errors import SaccadeError
from saccade.core.schema import AGAIN, EXPORT, read_json, typed
from saccade.models.interface import TensorSpec

T = TypeVar("T")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_AXIS = re.compile(r"[a-z][a-z0-9_]{0,63}|[1-9][0-9]{0,9}")
# Tensor types that servers and clients support.
_DTYPES = (
    "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool",
)  # fmt: skip
MOST_TENSORS, MOST_AXES = 64, 16
MOST_NUMBERS = 2**31  # in one sample of one tensor
MOST_LABELS, MOST_CHARACTERS = 100_000, 1_000  # ImageNet-21k has 21,843 labels


def read_stored(
    path: Path,
    kind: type[T],
    schema: str,
    version: int,
    *,
    complete: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    problems: Callable[[T], Iterable[str]],
    command: str = EXPORT,
) -> T:
    """Read a JSON file of a schema and version, and check every key, type and value.

    `complete` adds keys that only some files have. `problems` yields in what the content
    contradicts itself. `command` writes such a file.

    Raises: SaccadeError for the first thing that is wrong.
    """
    try:
        content = read_json(path, command)
        found = content.pop("schema", None), content.pop("version", None)
        if found != (schema, version) or isinstance(found[1], bool):
            raise SaccadeError(
                f"{path}: schema is {found[0]!r:.80} version {found[1]!r:.20}, expected {schema!r} "
                f"version {version}. Use the release of saccade that wrote it, or write "
                f"it again with: {EXPORT}"
            )
        value: T = typed(kind, complete(content), f"{path}: ")
        for problem in problems(value):
            raise SaccadeError(f"{path}: {problem}. {AGAIN}")
    except SaccadeError as error:
        # The value checks are shared by files that other commands write.
        raise SaccadeError(str(error).replace(EXPORT, command)) from error
    return value


def unequal(checks: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Compare values of a manifest with those derived from it: found, expected, what it is."""
    for actual, expected, what in checks:
        if actual != expected:
            yield f"{what} is {actual!r:.80}, expected {expected!r}"


def odd_hashes(digests: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong with hashes that are not a SHA-256."""
    for digest in digests:
        if not _SHA256.fullmatch(digest):
            yield f"{digest!r:.80} is not a SHA-256 in hexadecimal"


def odd_tensors(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Iterator[str]:
    """Yield what is wrong if inputs and outputs are empty, too many, or not valid tensors."""
    if not inputs or not outputs:
        yield "inputs or outputs are empty"
    if (count := len(inputs) + len(outputs)) > MOST_TENSORS:
        yield f"has {count} inputs and outputs, expected at most {MOST_TENSORS}"
    for spec in (*inputs, *outputs):
        axes = spec.axes.split()
        if not axes or not all(map(_AXIS.fullmatch, axes)):
            yield f"axes {spec.axes!r:.80} of {spec.name!r:.80} are not words and numbers"
            continue
        numbers = math.prod(int(axis) for axis in axes if axis.isdecimal())
        for fits, actual, expected in (
            (spec.name.isprintable(), f"name {spec.name!r:.80}", "no control characters"),
            (len(spec.name) <= MOST_CHARACTERS, f"name {spec.name!r:.80}", "a shorter name"),
            (spec.dtype in _DTYPES, f"type {spec.dtype!r:.80}", f"one of {', '.join(_DTYPES)}"),
            (len(spec.axes) <= MOST_CHARACTERS, f"axes {spec.axes!r:.80}", "fewer"),
            (len(axes) <= MOST_AXES, f"axes {spec.axes!r:.80}", f"at most {MOST_AXES}"),
            (numbers <= MOST_NUMBERS, f"axes {spec.axes!r:.80}", f"at most {MOST_NUMBERS} numbers"),
        ):
            if not fits:
                yield f"a tensor has {actual}, expected {expected}"
