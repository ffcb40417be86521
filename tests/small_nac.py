# SPDX-License-Identifier: Apache-2.0
"""A small NAC in float64 with arguments, for tests of its mathematics."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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

# In the form of the authors' code: as their INET-110E templates, their baseline, and
# TINY-INET-NC-X, whose read-in modules stay beside the processor's.
THEIRS = {
    "tokenizer": "convnext",
    "convnext_blocks": (1, 0),
    "convnext_widths": (5, 7),
    "positions": "concat",
    "token_width": 10,
    "height_px": 16,
    "width_px": 24,
    "code_dim": 16,
    "initial_state": "code",
    "ffn_gate": "geglu",
    "head_dim": 3,
    "read_head_dim": 6,
    "read_in_residual": True,
    "read_in_query_norm": True,
    "read_out_query_norm": True,
    "modfc_norm_affine": False,
}
PAPER = {**THEIRS, "read_in_codes": "own"}
FIRST = {"confidence": "first", "readout_modules": 1}
BESIDE = {
    **PAPER,
    **FIRST,
    "read_in_modules": 5,
    "initial_state": "linear",
    "state_noise": True,
    "modfc_one": False,
    "read_heads": 2,
    "read_head_dim": 4,
    "read_in_residual": False,
    "read_out_residual": True,
    "sender_norm": True,
    "truncate": 0.9,
    "truncate_read_out": False,
    "epsilon_learned": True,
    "head": "modulated",
    "head_norm": True,
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


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return made
