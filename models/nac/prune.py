# SPDX-License-Identifier: Apache-2.0
"""A NAC of fewer modules: rows of codes and signatures, nothing is renormalised."""

from dataclasses import replace
from typing import Any

import torch

from saccade.errors import SaccadeError
from saccade.models.budget import Budget


@torch.no_grad()
def pruned(model: Any, budget: float) -> Any:
    """A new NAC of the floor(budget U + 0.5) first modules of `module_order`.

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
            tables.append("read_in_codes")  # a read-in of its own modules keeps them all
        selected = [f"generator.{name}" for name in tables]
    for name in selected:
        if name in state:
            state[name] = state[name][chosen]
    state["module_order"] = torch.arange(keep, device=chosen.device)
    small = type(model)(config, fresh=False).to(model.read_out_codes)
    small.load_state_dict(state)
    return small.train(model.training)
