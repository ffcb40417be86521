# SPDX-License-Identifier: Apache-2.0
"""The kernel of a NAC's links: attention biases per layer, drawn in training, and their mean."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from saccade.models.nac.config import NACConfig
from saccade.models.nac.skmdpa import evaluation_bias, sampled_bias

LEAST = 0.01  # smallest effective value of a learned bandwidth: the kernel is undefined at 0


class Kernel(nn.Module):
    """log K per layer from distances of signatures; its parameters are learned bandwidths.

    Source: eq. 2 and 3.
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.config = config
        self.learned = config.epsilon_learned and config.connectivity != "dense"
        if self.learned:
            layers = config.propagator_layers + 1
            self.bandwidth = nn.Parameter(torch.full((layers,), config.epsilon))

    def epsilons(self) -> list[float | Tensor]:
        """Return the propagators' distinct bandwidths; the read-out's if there is no propagator."""
        if not self.learned:
            return [self.config.epsilon]
        return [self._epsilon(layer) for layer in range(len(self.bandwidth) - 1)] or [
            self._epsilon(-1)
        ]

    def layers(self, distance: Tensor | None, batch: int) -> Iterator[Tensor | None]:
        """Yield the bias of each propagator; in training each has a separate draw.

        Shapes: distance [i j] or [b i j] -> same, or [b i j] for a draw per sample.
        """
        fixed = None if self.training else self.constant(distance)
        for layer in range(self.config.propagator_layers):
            if fixed is None and distance is not None:
                yield self._drawn(distance, self._epsilon(layer), batch, self.config.truncate)
            else:
                yield self.of_layer(fixed, layer)

    def read_out(self, distance: Tensor | None, batch: int) -> Tensor | None:
        """Return the bias of the read-out.

        Shapes: as `layers`.
        """
        if distance is None:
            return None
        config = self.config
        truncate = config.truncate if config.truncate_read_out else 0.0
        if self.training:
            return self._drawn(distance, self._epsilon(-1), batch, truncate)
        return evaluation_bias(distance, self._epsilon(-1), truncate)

    def constant(self, distance: Tensor | None) -> Tensor | None:
        """Return the biases of all propagators in evaluation, for `of_layer`.

        Shapes: distance [... i j] -> same, or [... l i j] if epsilon is learned.
        """
        if distance is None:
            return None
        if not self.learned:
            return evaluation_bias(distance, self.config.epsilon, self.config.truncate)
        epsilon = torch.stack([torch.as_tensor(epsilon) for epsilon in self.epsilons()])
        epsilon = epsilon.reshape(-1, 1, 1)
        return evaluation_bias(distance.unsqueeze(-3), epsilon, self.config.truncate)

    def of_layer(self, biases: Tensor | None, layer: int) -> Tensor | None:
        """Return one propagator's bias from the result of `constant`."""
        return biases.select(-3, layer) if self.learned and biases is not None else biases

    def links(self, biases: Tensor) -> Tensor:
        """Return the link probabilities, averaged over the propagators.

        Shapes: the result of `constant` -> [... i j].
        """
        return biases.exp().mean(-3) if self.learned else biases.exp()

    def _epsilon(self, layer: int) -> float | Tensor:
        return self.bandwidth[layer].clamp_min(LEAST) if self.learned else self.config.epsilon

    def _drawn(
        self, distance: Tensor, epsilon: float | Tensor, batch: int, truncate: float
    ) -> Tensor:
        config = self.config
        log_p = evaluation_bias(distance, epsilon, truncate)
        if config.kernel_draw == "none":
            return log_p
        shape = tuple(distance.shape)
        if config.kernel_draw == "sample" and distance.dim() == 2:
            shape = (batch, *shape)
        p_min, p_max, clamped = config.p_min, config.p_max, config.kernel_clamp == "dtype"
        if clamped:
            p_min = torch.finfo(distance.dtype).eps
            p_max = 1 - p_min
        limits = {"tau": config.tau, "p_min": p_min, "p_max": p_max}
        return sampled_bias(log_p, shape=shape, clamp_sample=clamped, **limits)
