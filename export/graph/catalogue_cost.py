# SPDX-License-Identifier: Apache-2.0
"""Count the multiply-adds of a named model size from its graph, without a checkpoint."""

from typing import Any

import numpy as np

from saccade.exporter.graph.cost import cost_of, parameters_of
from saccade.exporter.graph.samples import random_inputs
from saccade.models.catalogue import preset_of
from saccade.models.families import build

_SAMPLES = 3  # as many as tracing needs


def cost_of_size(family: str, name: str) -> dict[str, Any]:
    """Count parameters and multiply-adds per sample by component, for the largest default variant.

    The weights are random.
    Raises: SaccadeError if there is no such family or size.
    """
    from saccade.exporter.graph.tracing import trace_component

    model: Any = build(family, preset_of(family, name).to_dict()).eval()
    parameters = parameters_of(model)
    folded = model.at(model.budgets()[0]).fold().float()
    counts = {}
    for component in folded.components():
        inputs = random_inputs(component, np.random.default_rng(0), _SAMPLES)
        proto = trace_component(folded, component, inputs, component.outputs)
        counts[component.role] = cost_of(proto, parameters, inputs).multiply_adds.total
    return {"parameters": parameters, "multiply_adds": counts}
