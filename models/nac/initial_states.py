# SPDX-License-Identifier: Apache-2.0
"""theta^(0): the state that a module starts from, made of its code."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.nac.config import NACConfig
from saccade.models.nac.modulation import linear


class InitialState(nn.Module):
    """A two-layer MLP of the code, for processor and read-out modules alike.

    Shapes: code [... c] -> [... d].
    Source: section 2.2.
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.first = linear(config.code_dim, config.dim)
        self.second = linear(config.dim, config.dim, scale=math.sqrt(2))

    def forward(self, code: Tensor, batch: int = 1) -> Tensor:
        return self.second(F.gelu(self.first(code)))


class CodeAsState(nn.Module):
    """The code itself, which is as wide as a state.

    Shapes: code [... d] -> same.
    Source: the authors' code in the configurations of the paper.
    """

    def forward(self, code: Tensor, batch: int = 1) -> Tensor:
        return code


class LinearState(nn.Module):
    """LayerNorm and one layer; with noise, training draws around it for each of `batch` samples.

    Shapes: code [u c] -> [u d], or with noise drawn [b u d].
    Source: the authors' code by default, which draws in evaluation too: two evaluations of one
            image differ there, here they do not.
    """

    def __init__(self, config: NACConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.code_dim)
        self.mean = linear(config.code_dim, config.dim)
        self.log_variance: nn.Linear | None = None
        if config.state_noise:
            self.log_variance = linear(config.code_dim, config.dim)
            nn.init.constant_(self.log_variance.bias, -5.0)

    def forward(self, code: Tensor, batch: int = 1) -> Tensor:
        x = self.norm(code)
        mean = self.mean(x)
        if self.log_variance is None or not self.training:
            return mean
        drawn = torch.randn(batch, *mean.shape, dtype=mean.dtype, device=mean.device)
        return mean + drawn * torch.exp(self.log_variance(x) / 2)


def initial_state(config: NACConfig) -> nn.Module:
    """The form that the configuration asks for."""
    forms = {"mlp": InitialState, "linear": LinearState}
    return CodeAsState() if config.initial_state == "code" else forms[config.initial_state](config)
