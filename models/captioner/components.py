# SPDX-License-Identifier: Apache-2.0
"""The function of a captioner, and its components: `encode` (image to first state) and `step`."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from saccade.core.errors import ShapeError
from saccade.models.captioner.config import CaptionerConfig
from saccade.models.interface import Arrays, Component, TensorSpec, image_spec
from saccade.models.layers.attention_invariants import no_excess, same_support, sums_to_one
from saccade.plugins.ops import sparsemax, tvmax
from saccade.plugins.tvmax.contract import SMALLEST_FLOAT32_TOLERANCE

OUTPUTS = ("logits", "log_probabilities", "next_h", "next_c", "attention")
_CHUNK = 64


class StepOutput(NamedTuple):
    """The output of one step.

    Shapes: logits [b v], h and c [b n], attention and input_attention [b H W], error [b]: the
            certified distance of TVMax from its minimum, None for the other maps.
    """

    logits: Tensor
    h: Tensor
    c: Tensor
    attention: Tensor
    input_attention: Tensor
    error: Tensor | None


def convolutions(config: CaptionerConfig) -> nn.Sequential:
    """Create a convolution, batch norm and ReLU for each of the widths.

    Shapes: [b c h w] -> [b widths[-1] H W].
    """
    layers: list[nn.Module] = []
    before = config.channels
    for width, stride in zip(config.widths, config.strides, strict=True):
        reach = (stride + 1) // 2
        layers += [
            nn.Conv2d(before, width, 2 * reach + 1, stride, reach, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        before = width
    return nn.Sequential(*layers)


def feature_parts(features: Tensor, config: CaptionerConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Split features into the cells' vectors and their keys for input and output attention.

    Shapes: features [b H W dim + 2 a] -> [b H W dim], [b H W a], [b H W a].
    """
    g, a = config.dim, config.attention_dim
    return features[..., :g], features[..., g : g + a], features[..., g + a :]


def scored(key: Tensor, query: Tensor, score: nn.Linear) -> Tensor:
    """Return w tanh(affine([v; h])), with the affine map split into its cell and state parts.

    Shapes: key [b H W a], query [b a] -> [b H W].
    """
    return score(torch.tanh(key + query[:, None, None]))[..., 0]


def attend(weights: Tensor, visual: Tensor) -> Tensor:
    """Return the weighted mean of the cells.

    Shapes: weights [b H W], visual [b H W g] -> [b g].
    """
    return (weights.flatten(1)[:, None] @ visual.flatten(1, 2))[:, 0]


def output_weights(score: Tensor, config: CaptionerConfig) -> tuple[Tensor, Tensor | None]:
    """Map scores to weights as configured, and return the bound of the error.

    Shapes: score [b H W] -> weights [b H W], error [b] of TVMax.
    """
    if config.attention == "tvmax":
        limits = {"tolerance": config.tolerance, "max_iterations": config.max_iterations}
        return tvmax(score, lam=config.lam, return_error=True, **limits)
    flat = score.flatten(1)
    weights = sparsemax(flat) if config.attention == "sparsemax" else flat.softmax(-1)
    return weights.view_as(score), None


class CaptionerFunction(nn.Module, ABC):
    """The function of a captioner, folded or not; how it computes a step is the subclass's."""

    config: CaptionerConfig
    position: Any
    scale: nn.Module
    convolutions: Any
    feed_forward: nn.Linear

    def encode(self, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode an image for the steps, and return their first state.

        Shapes: image [b h w c] of 0 to 255, or a grid of features [b H W feature_dim]
            -> features [b H W dim + 2 attention_dim], h and c [b n].
        Raises: ShapeError if the image or grid has another size.
        """
        visual = torch.relu(self.feed_forward(self._grid(image)))
        if self.config.position:
            visual = visual + self.position
        h, c = self.first_state(visual.mean((1, 2)))
        return torch.cat([visual, *self.keys_of(visual)], -1), h, c

    def _grid(self, image: Tensor) -> Tensor:
        if self.config.takes_pixels:
            pixels = self.scale(image).permute(0, 3, 1, 2)
            return self.convolutions(pixels).permute(0, 2, 3, 1)
        expected = (self.config.grid_height, self.config.grid_width, self.config.feature_dim)
        if image.dim() != 4 or tuple(image.shape[1:]) != expected:
            raise ShapeError(
                f"grid: found shape {list(image.shape)}, expected {['b', *expected]}. "
                "Use features of the network that the captioner was trained with."
            )
        return image.to(self.feed_forward.weight.dtype)

    @abstractmethod
    def first_state(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and c before the first step.

        Shapes: mean [b dim], the mean of the cells' vectors -> [b n] each.
        """

    @abstractmethod
    def keys_of(self, visual: Tensor) -> tuple[Tensor, ...]:
        """Return the cells' parts of the affine maps of input and output attention.

        Shapes: visual [b H W dim] -> one or more, 2 attention_dim channels in all.
        """

    @abstractmethod
    def step(self, features: Tensor, h: Tensor, c: Tensor, token: Tensor) -> StepOutput:
        """Predict the next word.

        Shapes: features as returned by `encode`, h and c [b n], token [b] int64.
        """

    def components(self) -> tuple[Component, ...]:
        """Return `encode` and `step`; the caller has to run the search."""
        return _encode(self), _step(self)


def _encode(model: CaptionerFunction) -> Component:
    def run(**inputs: Tensor) -> dict[str, Tensor]:
        (image,) = inputs.values()
        return dict(zip(("features", "h", "c"), model.encode(image), strict=True))

    return Component("encode", (_source(model.config),), ("features", "h", "c"), run)


def _source(config: CaptionerConfig) -> TensorSpec:
    if config.takes_pixels:
        return image_spec(config)
    return TensorSpec("grid", f"{_grid(config)} {config.feature_dim}", "float32")


def _grid(config: CaptionerConfig) -> str:
    return f"b {config.grid_height} {config.grid_width}"


def _step(model: CaptionerFunction) -> Component:
    config = model.config
    source = _source(config)

    def real(arrays: Arrays) -> dict[str, np.ndarray]:
        return _states(model, arrays[source.name])

    def random(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        shape: Any = (count, *source.shape[1:])
        if source.dtype == "uint8":
            values = rng.integers(0, 256, shape, dtype=np.uint8)
        else:
            values = rng.standard_normal(shape, dtype=np.float32)
        drawn = rng.integers(0, config.vocabulary, count)
        return _states(model, values) | {"token": drawn}

    width = config.dim + 2 * config.attention_dim
    bounds = {"tvmax_bound": no_excess} if config.attention == "tvmax" else {}
    sparse = {"attention_support": same_support} if config.attention != "softmax" else {}
    return Component(
        role="step",
        inputs=(
            TensorSpec("features", f"{_grid(config)} {width}", "float32"),
            TensorSpec("h", f"b {config.hidden_dim}", "float32"),
            TensorSpec("c", f"b {config.hidden_dim}", "float32"),
            TensorSpec("token", "b", "int64"),
        ),
        outputs=(*OUTPUTS, "attention_excess") if bounds else OUTPUTS,
        optional=("input_attention",),
        run=lambda features, h, c, token: _stepped(model, features, h, c, token),
        real=real,
        random=random,
        invariants={"attention_sums_to_one": sums_to_one, **sparse, **bounds},
    )


def _stepped(
    model: CaptionerFunction, features: Tensor, h: Tensor, c: Tensor, token: Tensor
) -> dict[str, Tensor]:
    """Predict one word; `attention_excess` is how far TVMax's error exceeds its tolerance."""
    answer = model.step(features, h, c, token)
    outputs = {
        "logits": answer.logits,
        "log_probabilities": answer.logits.log_softmax(-1),
        "next_h": answer.h,
        "next_c": answer.c,
        "attention": answer.attention,
        "input_attention": answer.input_attention,
    }
    if answer.error is not None:
        # In float32 the op raises a tolerance that its arithmetic cannot certify.
        allowed = 1.001 * max(model.config.tolerance, SMALLEST_FLOAT32_TOLERANCE)
        outputs["attention_excess"] = torch.relu(answer.error - allowed)
    return outputs


def _states(model: CaptionerFunction, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return states of greedy captions: sample i is taken after i mod 8 words.

    Shapes: images [n ...] -> features, h, c, token of n samples.
    """
    parts = [_walked(model, images[at : at + _CHUNK], at) for at in range(0, len(images), _CHUNK)]
    return {name: np.concatenate([chunk[name] for chunk in parts]) for name in parts[0]}


@torch.no_grad()
def _walked(model: CaptionerFunction, images: np.ndarray, offset: int) -> dict[str, np.ndarray]:
    config = model.config
    features, h, c = model.encode(torch.from_numpy(np.ascontiguousarray(images)))
    words = torch.arange(offset, offset + len(images)) % min(8, config.max_length)
    token = torch.full((len(images),), config.start)
    for place in range(int(words.max())):
        answer = model.step(features, h, c, token)
        going = words > place
        token = torch.where(going, answer.logits.argmax(-1), token)
        h = torch.where(going[:, None], answer.h, h)
        c = torch.where(going[:, None], answer.c, c)
    state = {"features": features, "h": h, "c": c}
    arrays = {name: array.float().numpy() for name, array in state.items()}
    return arrays | {"token": token.numpy()}
