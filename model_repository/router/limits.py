# SPDX-License-Identifier: Apache-2.0
"""Check whole numbers that a model would silently misread: sizes, counts, lengths and ids."""

from collections.abc import Callable
from typing import Any

import numpy as np
from choose import RequestRefused


def check_numbers(
    inputs: dict[str, np.ndarray],
    metadata: dict[str, Any],
    most_of: Callable[[str, dict[str, Any]], Any],
) -> None:
    """Check that the model has every size, count, length and id; `most_of` is like `largest`.

    Raises: RequestRefused with the input, the sample, and the numbers found and expected.
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
    """Return the largest number of an input, or of each of its columns; None without a limit."""
    if name == "tokens" and "vocabulary" in metadata:
        return int(metadata["vocabulary"]) - 1
    if name.partition("_")[0] == "length":
        return metadata.get("max_tokens")
    return metadata.get("condition_tokens") if name == "condition_length" else None


def shown(numbers: np.ndarray) -> str:
    """Return numbers as text, at most the first eight."""
    return ",".join(str(number) for number in numbers[:8]) + (",..." if numbers.size > 8 else "")
