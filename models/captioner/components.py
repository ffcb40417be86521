# SPDX-License-Identifier: Apache-2.0
"""The components of a captioner: `encode` (image to features and first state) and `step`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.models.captioner.config import CaptionerConfig
from saccade.models.interface import Arrays, Component, TensorSpec
from saccade.models.layers.attention_invariants import no_excess, same_support, sums_to_one
from saccade.plugins.tvmax.contract import SMALLEST_FLOAT32_TOLERANCE

OUTPUTS = ("logits", "log_probabilities", "next_h", "next_c", "attention")
_CHUNK = 64


def components_of(model: Any) -> tuple[Component, ...]:
    """Return both components of a captioner or of its folded form."""
    return _encode(model), _step(model)


def _encode(model: Any) -> Component:
    def run(**inputs: Tensor) -> dict[str, Tensor]:
        (image,) = inputs.values()
        return dict(zip(("features", "h", "c"), model.encode(image), strict=True))

    return Component("encode", (_source(model.config),), ("features", "h", "c"), run)


def _source(config: CaptionerConfig) -> TensorSpec:
    if config.takes_pixels:
        size = f"b {config.height_px} {config.width_px} {config.channels}"
        return TensorSpec("image", size, "uint8")
    return TensorSpec("grid", f"{_grid(config)} {config.feature_dim}", "float32")


def _grid(config: CaptionerConfig) -> str:
    return f"b {config.grid_height} {config.grid_width}"


def _step(model: Any) -> Component:
    config: CaptionerConfig = model.config
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
    model: Any, features: Tensor, h: Tensor, c: Tensor, token: Tensor
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


def _states(model: Any, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return states of greedy captions: sample i is taken after i mod 8 words.

    Shapes: images [n ...] -> features, h, c, token of n samples.
    """
    parts = [_walked(model, images[at : at + _CHUNK], at) for at in range(0, len(images), _CHUNK)]
    return {name: np.concatenate([chunk[name] for chunk in parts]) for name in parts[0]}


@torch.no_grad()
def _walked(model: Any, images: np.ndarray, offset: int) -> dict[str, np.ndarray]:
    config: CaptionerConfig = model.config
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
