# SPDX-License-Identifier: Apache-2.0
"""What a NAC on digits-sum learns beside the sum: what is on the canvas."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.nac.model import NAC

DIGITS = 10
SUMS = 9 * 4 + 1  # four digits add up to 0 to 36


class Auxiliary(nn.Module):
    """Linear heads that exist in training only and are thrown away after it.

    A sum modulo 10 alone tells a network next to nothing about single digits. From the state in
    front of the last layer, and from each module's state behind each propagator, one linear layer
    predicts how often each digit is on the canvas (squared error) and the plain sum (cross
    entropy over 0 to 36).
    """

    DEEP_WEIGHT = 0.5  # of the modules' own predictions, beside the embedding's
    COUNTS_WEIGHT = 2.0  # squared errors are small beside cross entropies

    def __init__(self, model: NAC) -> None:
        super().__init__()
        dim = model.config.dim
        self.heads = nn.ModuleList(
            nn.Linear(dim, DIGITS + SUMS) for _ in range(1 + len(model.propagators))
        )
        self._states: dict[int, Tensor] = {}
        self._hooks: list[Any] = [model.head.register_forward_pre_hook(self._remember_embedding)]
        for index, propagator in enumerate(model.propagators):
            self._hooks.append(propagator.register_forward_hook(self._remember(index + 1)))

    def _remember_embedding(self, module: nn.Module, inputs: Any) -> None:
        self._states[0] = inputs[0]

    def _remember(self, index: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            self._states[index] = output

        return hook

    def loss(self, counts: Tensor) -> Tensor:
        """Of the model's latest forward pass.

        Shapes: counts [b 10], how often each digit is on the canvas -> scalar.
        """
        total = counts.new_zeros(())
        sums = (counts * torch.arange(DIGITS, device=counts.device)).sum(1).long()
        for index, head in enumerate(self.heads):
            predicted = head(self._states[index]).float()
            weight = self.DEEP_WEIGHT if index else 1.0
            wanted, wanted_sums = counts, sums
            if predicted.dim() == 3:
                modules = predicted.shape[1]
                wanted = counts.unsqueeze(1).expand(-1, modules, -1)
                wanted_sums = sums.repeat_interleave(modules)
            squared = F.mse_loss(predicted[..., :DIGITS], wanted)
            crossed = F.cross_entropy(predicted[..., DIGITS:].flatten(0, -2), wanted_sums)
            total = total + weight * (self.COUNTS_WEIGHT * squared + crossed)
        return total

    def detach(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()
