# SPDX-License-Identifier: Apache-2.0
"""JSON files of which a test changes something; they stay JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edited(path: Path, change: Callable[[Any], Any]) -> Path:
    """Change the content in place, or to what `change` returns."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content) or content))
    return path


def put(path: Path, keys: tuple[str | int, ...], value: Any) -> Path:
    """Change one value, which these keys lead to."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return edited(path, change)
