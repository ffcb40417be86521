# SPDX-License-Identifier: Apache-2.0
"""Shipped checkpoints: small trained checkpoints inside the package, each with its card."""

from pathlib import Path

from saccade.core.checks import did_you_mean
from saccade.core.errors import SaccadeError

SHIPPED = "shipped:"  # prefix of a name, used instead of a path


def located(path: Path | str) -> Path:
    """Return the path of a checkpoint; `shipped:NAME` is a shipped checkpoint.

    Raises: SaccadeError if there is no shipped checkpoint of that name.
    """
    text = str(path)
    return (
        shipped_checkpoint(text.removeprefix(SHIPPED)) if text.startswith(SHIPPED) else Path(path)
    )


def shipped_checkpoint(name: str) -> Path:
    """Return the path of a shipped checkpoint.

    Raises: SaccadeError if there is no shipped checkpoint of that name.
    """
    folder = Path(__file__).parent
    path = folder / f"{name}.safetensors"
    if path.parent != folder or not path.is_file():
        there = sorted(path.stem for path in folder.glob("*.safetensors"))
        raise SaccadeError(
            f"saccade has no shipped checkpoint {name!r}.{did_you_mean(name, there)} Choose one "
            f"of: {', '.join(there)}."
        )
    return path
