# SPDX-License-Identifier: Apache-2.0
"""Which modules a training step keeps, and which order says who is kept first."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from saccade.models.nac.config import NACConfig
from saccade.models.nac.generator import Circuit
from saccade.models.nac.graph_orders import degree_order
from saccade.models.nac.kernel import Kernel
from saccade.models.nac.skmdpa import signature_distance


def circuit_order(circuit: Circuit, kernel: Kernel) -> Tensor:
    """Processor modules by descending degree, its mean over the samples of a conditional circuit.

    Shapes: signatures [u s] or [b u s] -> int64 [u]; the modules' own order where links are dense.
    """
    signatures = circuit.signatures
    if signatures is None:
        return torch.arange(circuit.codes.shape[-2], device=circuit.codes.device)
    biases = kernel.constant(signature_distance(signatures, signatures).double())
    assert biases is not None
    links = kernel.links(biases)
    return degree_order(links.mean(0) if links.dim() == 3 else links)


class ModuleDropout:
    """A draw of the modules that a training step keeps, from torch's global generator.

    A share of the modules, from `module_dropout` to 1, is kept: the best connected ones in
    `dropout_ordered` of the steps, else a random subset.
    """

    def __init__(self, config: NACConfig) -> None:
        self.config = config
        self._order: Tensor | None = None
        self._calls = 0

    def draw(self, rank: Callable[[], Tensor]) -> Tensor | None:
        """Indices of the modules to keep, or none for all; `rank` gives their order.

        Shapes: -> int64 [m].
        """
        config = self.config
        if config.module_dropout >= 1:
            return None
        smallest = config.module_dropout
        if config.dropout_draw == "uniform":
            fraction = smallest + (1 - smallest) * torch.rand(()).item()
        else:
            fraction = smallest ** torch.rand(()).item()
        keep = max(1, math.floor(fraction * config.modules + 0.5))
        ordered = torch.rand(()).item() < config.dropout_ordered
        chosen = self._current(rank) if ordered else torch.randperm(config.modules)
        return chosen[:keep]

    def _current(self, rank: Callable[[], Tensor]) -> Tensor:
        if self.config.conditional:
            return rank()
        if self._order is None or self._calls % self.config.graph_refresh_steps == 0:
            self._order = rank()
        self._calls += 1
        return self._order
