# SPDX-License-Identifier: Apache-2.0
"""Pruning of a NAC: the order of its modules, and their rows of codes and signatures."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from saccade.core.errors import SaccadeError
from saccade.models.budget import Budget
from saccade.models.nac.generator import Circuit
from saccade.models.nac.graph_orders import degree_order
from saccade.models.nac.kernel import Kernel
from saccade.models.nac.skmdpa import signature_distance


def circuit_order(circuit: Circuit, kernel: Kernel) -> Tensor:
    """Return processor modules by descending degree, averaged over a conditional circuit's samples.

    Shapes: signatures [u s] or [b u s] -> int64 [u]; their original order if links are dense.
    """
    signatures = circuit.signatures
    if signatures is None:
        return torch.arange(circuit.codes.shape[-2], device=circuit.codes.device)
    biases = kernel.constant(signature_distance(signatures, signatures).double())
    assert biases is not None
    links = kernel.links(biases)
    return degree_order(links.mean(0) if links.dim() == 3 else links)


@torch.no_grad()
def pruned(model: Any, budget: float) -> Any:
    """Return a new NAC of the floor(budget U + 0.5) first modules of `module_order`, without
    renormalization.

    Raises: SaccadeError if the budget is not in (0, 1] or keeps no module.
    """
    total = model.config.modules
    keep = Budget(budget).of(total) if 0 < budget <= 1 else 0
    if keep < 1:
        raise SaccadeError(
            f"budget {budget}: keeps no module of {total}, or is not above 0 and at most 1. "
            f"Expected at least 1/{2 * total}. Choose a larger budget."
        )
    chosen = model.module_order[:keep]
    config = replace(model.config, modules=keep)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if model.config.conditional:
        config = replace(config, generator_modules=model.config.generator_modules or total)
        selected = ["generator.kept"]
    else:
        tables = ["codes", "signatures"]
        if config.read_in_modules == 0:
            tables.append("read_in_codes")  # a read-in with separate modules keeps them all
        selected = [f"generator.{name}" for name in tables]
    for name in selected:
        if name in state:
            state[name] = state[name][chosen]
    state["module_order"] = torch.arange(keep, device=chosen.device)
    small = type(model)(config, fresh=False).to(model.read_out_codes)
    small.load_state_dict(state)
    return small.train(model.training)
