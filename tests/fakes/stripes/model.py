# SPDX-License-Identifier: Apache-2.0
"""The model of stripes and its folded form, in which the scale of the pixels is in the weights."""

from dataclasses import replace
from typing import Any

import torch
from fakes.stripes.config import SIDE_PX, StripesConfig
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.budget import ComputeBudget
from saccade.models.interface import Component, Family, TensorSpec

CENTER = 127.5


class Stripes(nn.Module, Family):
    """Units on the pixels and a classifier; `sign` -1 is the negative of the picture.

    Shapes: image [b 8 8 1], sign [b 1] -> logits [b 2] and more, by name.
    """

    config_class = StripesConfig

    def __init__(self, config: StripesConfig, *, fresh: bool = True) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.units = nn.Linear(SIDE_PX**2, config.units)
            self.head = nn.Linear(config.units, 2)

    def forward(self, image: Tensor, sign: Tensor) -> dict[str, Tensor]:
        kind = self.units.weight.dtype
        pixels = (image.to(kind).flatten(1) - CENTER) / CENTER * sign.to(kind)
        return answers(self, pixels)

    def components(self) -> tuple[Component, ...]:
        return (component_of(self),)

    def at(self, budget: ComputeBudget) -> "Stripes":
        other = Stripes(replace(self.config, units=budget.kept), fresh=False)
        state = {name: value.clone() for name, value in self.state_dict().items()}
        for name in ("units.weight", "units.bias"):
            state[name] = state[name][: budget.kept]
        state["head.weight"] = state["head.weight"][:, : budget.kept]
        other.load_state_dict(state)
        return other.to(self.units.weight).train(self.training)

    def runtime_metadata(self) -> dict[str, Any]:
        return {"side_px": SIDE_PX}


class FoldedStripes(nn.Module):
    """The same function of a picture whose pixels are only centred."""

    def __init__(self, source: Stripes) -> None:
        super().__init__()
        self.config, self.units, self.head = source.config, source.units, source.head
        with torch.no_grad():
            self.units.weight.div_(CENTER)

    def forward(self, image: Tensor, sign: Tensor) -> dict[str, Tensor]:
        kind = self.units.weight.dtype
        return answers(self, (image.to(kind).flatten(1) - CENTER) * sign.to(kind))

    def components(self) -> tuple[Component, ...]:
        return (component_of(self),)


def answers(model: Any, pixels: Tensor) -> dict[str, Tensor]:
    """Logits, probabilities, and how much each pixel weighs."""
    units = F.gelu(model.units(pixels))
    logits = model.head(units)
    weights = (pixels * (units @ model.units.weight)).abs().unflatten(1, (SIDE_PX, SIDE_PX))
    return {"logits": logits, "probabilities": logits.softmax(-1), "weights": weights}


def component_of(model: Any) -> Component:
    image = TensorSpec("image", f"b {SIDE_PX} {SIDE_PX} 1", "uint8")
    outputs = ("logits", "probabilities")
    inputs = (image, TensorSpec("sign", "b 1", "float32"))
    return Component("", inputs, outputs, lambda **given: model(**given), optional=("weights",))
