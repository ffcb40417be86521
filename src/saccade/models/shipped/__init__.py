# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that come with the package, each with its card beside it."""

from pathlib import Path

from saccade.errors import SaccadeError

SHIPPED = "shipped:"  # before a name, in the place of a path


def located(path: Path | str) -> Path:
    """The file of a checkpoint; that of `shipped:NAME` comes with the package.

    Raises: SaccadeError if there is none of that name.
    """
    text = str(path)
    return (
        shipped_checkpoint(text.removeprefix(SHIPPED)) if text.startswith(SHIPPED) else Path(path)
    )


def shipped_checkpoint(name: str) -> Path:
    """The file of a checkpoint that comes with the package.

    Raises: SaccadeError if there is none of that name.
    """
    folder = Path(__file__).parent
    path = folder / f"{name}.safetensors"
    if path.parent != folder or not path.is_file():
        there = ", ".join(sorted(path.stem for path in folder.glob("*.safetensors")))
        raise SaccadeError(f"No checkpoint {name!r} comes with saccade. There are: {there}.")
    return path
