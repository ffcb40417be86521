# SPDX-License-Identifier: Apache-2.0
"""A whole request to a captioner: the encoder once, then the steps of a search."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.schema import AGAIN
from saccade.models.captioner.caption_search import best_captions, sentence, step_of
from saccade.models.interface import Arrays, TensorSpec

Runner = Callable[[Arrays], dict[str, np.ndarray]]


def captioned(metadata: Mapping[str, Any], runners: Mapping[str, Runner]) -> Runner:
    """Return a runner of the whole search with the model's default beam, as in the router."""
    step = step_of(runners["step"])
    limits = {name: int(metadata[name]) for name in ("beam", "start", "end", "max_length")}

    def run(inputs: Arrays) -> dict[str, np.ndarray]:
        best = best_captions(step, runners["encode"](inputs), **limits)
        captions = [sentence(caption, metadata["words"]).encode() for caption in best]
        return {"caption": np.array(captions, dtype=object)}

    return run


def router_outputs(
    model: str, outputs: Mapping[str, Sequence[TensorSpec]]
) -> tuple[TensorSpec, ...]:
    """Return the router's outputs: the sentence, and the attention at each of its words.

    Raises: SaccadeError if the step has no attention.
    """
    specs = {spec.name: spec for spec in outputs["step"]}
    if "attention" not in specs:
        raise SaccadeError(f"{model}: its step has no output 'attention'. {AGAIN}")
    axes = " ".join(["b", "steps", *specs["attention"].axes.split()[1:]])
    return TensorSpec("caption", "b bytes", "uint8"), TensorSpec("attention", axes, "float32")
