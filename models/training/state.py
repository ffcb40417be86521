# SPDX-License-Identifier: Apache-2.0
"""What an interrupted run needs to go on as if nothing had happened."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.errors import SaccadeError
from saccade.files import write_atomically
from saccade.json_text import parse_json
from saccade.models.torch_file import load_torch

VERSION = 1


def write_state(path: Path, state: dict[str, Any], run: dict[str, Any]) -> None:
    """Tensors, numbers and texts of a run, and which run it is.

    Raises: SaccadeError if the file cannot be written.
    """
    data = io.BytesIO()
    torch.save({"version": VERSION, "run": _text(run), "state": state}, data)
    write_atomically(path, data.getvalue())


def read_state(path: Path, run: dict[str, Any]) -> dict[str, Any]:
    """The state of that same run; nothing in the file is executed.

    Raises: SaccadeError if it is missing, damaged, or of a run with other options.
    """
    if not path.exists():
        raise SaccadeError(
            f"{path}: no such file, so there is no interrupted run to continue "
            "(a state is kept from the first minute on). Leave --resume out to start one."
        )
    try:
        found = load_torch(path)
        version, written, state = found["version"], parse_json(found["run"]), found["state"]
        if not (isinstance(written, dict) and isinstance(state, dict)):
            raise ValueError("no run with its state")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise SaccadeError(
            f"{path}: found a damaged file, expected the state of an interrupted run. "
            "Delete it and train again without --resume."
        ) from error
    if version != VERSION:
        raise SaccadeError(
            f"{path}: found state version {version}, expected {VERSION}. "
            "Resume with the saccade that wrote it, or start again with --force."
        )
    wanted = json.loads(_text(run))
    differing = sorted(
        key for key in written.keys() | wanted.keys() if written.get(key) != wanted.get(key)
    )
    if differing:
        raise SaccadeError(
            f"{path}: the state is of another run: {', '.join(differing)} differ. Give the options "
            "of the interrupted run (but --threads and --force), or start again with --force."
        )
    return state


def generator_state(rng: np.random.Generator) -> str:
    """The state of a NumPy generator as text."""
    return json.dumps(rng.bit_generator.state)


def restore_generator(rng: np.random.Generator, text: str) -> None:
    """The inverse of `generator_state`."""
    rng.bit_generator.state = json.loads(text)


def _text(run: dict[str, Any]) -> str:
    return json.dumps(run, sort_keys=True, default=repr)
