# SPDX-License-Identifier: Apache-2.0
"""Whole numbers of a request that a model would silently misread: sizes, counts, lengths, ids."""

from collections.abc import Callable
from typing import Any

import numpy as np
from choose import RequestRefused


def check_numbers(
    inputs: dict[str, np.ndarray],
    metadata: dict[str, Any],
    most_of: Callable[[str, dict[str, Any]], Any],
) -> None:
    """Every size, count, length and id is one that the model has; `most_of` is as `largest`.

    Raises: RequestRefused naming the input, the sample, what was found and what is expected.
    """
    for name, array in inputs.items():
        if array.dtype != np.int64 or (most := most_of(name, metadata)) is None:
            continue
        least = 0 if name in ("tokens", "question") else 1
        wrong = ((array < least) | (array > np.asarray(most))).any(axis=1)
        if wrong.any():
            sample = int(wrong.argmax())
            raise RequestRefused(
                f"input {name} of sample {sample} is {shown(array[sample])}, expected "
                f"{least} to {shown(np.atleast_1d(most))}"
            )


def largest(name: str, metadata: dict[str, Any]) -> Any:
    """The largest number of an input, or one for each of its columns; none where any will do."""
    if name == "tokens" and "vocabulary" in metadata:
        return int(metadata["vocabulary"]) - 1
    if name.partition("_")[0] == "length":
        return metadata.get("max_tokens")
    return metadata.get("condition_tokens") if name == "condition_length" else None


def shown(numbers: np.ndarray) -> str:
    """Some numbers in a row, the first eight of many."""
    return ",".join(str(number) for number in numbers[:8]) + (",..." if numbers.size > 8 else "")
