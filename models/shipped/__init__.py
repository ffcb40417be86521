# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that come with the package, each with its card beside it."""

from pathlib import Path

from saccade.errors import SaccadeError


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
