# SPDX-License-Identifier: Apache-2.0
"""Read a recorded case; a refused one is its own failure, not the end of the run."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from saccade.core.errors import SaccadeError


def lines_of(name: str, run: Callable[[], Iterable[str]]) -> list[str]:
    """Return the failures that a case reports; a refusal or any other error is one too."""
    try:
        return list(run())
    except SaccadeError as error:
        return [f"{name}: refused: {error}"]
    except Exception as error:
        return [f"{name}: cannot be computed: {error!r:.200}"]


def arrays_of(folder: Path, case: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the inputs and answers that were recorded."""
    where = case["arrays"]
    with np.load(folder / where["file"]) as file:
        return {name: file[where["prefix"] + name] for name in where["keys"]}


def weights_of(folder: Path, case: dict[str, Any]) -> dict[str, Tensor]:
    """Return the recorded weights; none for a case without any."""
    if not (where := case.get("weights")):
        return {}
    tensors = load_file(folder / where["file"])
    return {name: tensors[where["prefix"] + name] for name in where["keys"]}
