# SPDX-License-Identifier: Apache-2.0
"""Write a benchmark's result as JSON, without meaningless digits."""

from pathlib import Path
from typing import Any

from saccade.core.files import json_bytes, write_atomically


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write the result with every number rounded to five significant digits."""
    write_atomically(path, json_bytes(_rounded(result)))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
