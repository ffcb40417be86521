# SPDX-License-Identifier: Apache-2.0
"""A small NAC in float64 with arguments, for tests of its mathematics."""

import torch
from torch import Tensor

from saccade.models.nac.model import NAC, NACConfig

SMALL = {"modules": 16, "dim": 16, "code_dim": 6, "signature_dim": 5, "ffn_dim": 24, "seed": 1}

KINDS = {
    "default": {},
    "colour": {"channels": 3, "mean": (0.4, 0.5, 0.6), "std": (0.1, 0.2, 0.3)},
    "tokens": {"input": "tokens", "token_dim": 5},
    "dense": {"connectivity": "dense"},
    "perceiver": {"connectivity": "dense", "modulation": False},
    "conditional": {"conditional": True},
    "conditioned": {"conditional": True, "condition_dim": 7},
}


def nac(**changes: object) -> NAC:
    """A small float64 NAC in evaluation, away from its initial zeros and ones."""
    model = NAC(NACConfig(**{**SMALL, **changes})).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.add_(0.1 * noise)
        if not model.config.conditional:
            model.rank_modules()
    return model


def given(model: NAC, batch: int = 3, seed: int = 3) -> dict[str, Tensor]:
    """Arguments that the model takes."""
    config, generator = model.config, torch.Generator().manual_seed(seed)
    if config.input == "tokens":
        x = torch.randn(batch, 6, config.token_dim, generator=generator)
        arguments = {"x": x, "length": torch.arange(batch) * 2 % 6 + 1}
    else:
        shape = (batch, config.height_px, config.width_px, config.channels)
        arguments = {"x": torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)}
    if config.condition_dim:
        condition = torch.randn(batch, 4, config.condition_dim, generator=generator)
        arguments |= {"condition": condition, "condition_length": torch.arange(batch) % 4 + 1}
    return arguments
