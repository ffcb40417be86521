# SPDX-License-Identifier: Apache-2.0
"""How far two models with the same weights are from each other on sample inputs."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn

from saccade.models.interface import Part

SAMPLES = 16


@torch.no_grad()
def largest_change(
    authors: nn.Module, exact: nn.Module, arrays: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """The largest change of the logits, or of the first output, in float64.

    Shapes: arrays [n ...], the calibration samples.
    """
    samples = {name: each[:SAMPLES] for name, each in arrays.items()}
    found = []
    for model in (authors, exact):
        part: Part = deepcopy(model).double().parts()[0]  # type: ignore[operator]
        given = part.real(samples) if part.real else samples
        inputs = {spec.name: torch.from_numpy(given[spec.name].copy()) for spec in part.inputs}
        wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        found.append(part.run(**wide))
    name = "logits" if "logits" in part.outputs else part.outputs[0]
    before, after = (each[name] for each in found)
    return {
        "output": name,
        "samples": min(SAMPLES, len(before)),
        "largest_change": float((before - after).abs().max()),
        "largest_value": float(before.abs().max()),
    }
