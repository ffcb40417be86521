# SPDX-License-Identifier: Apache-2.0
"""The components of a slot attention model: one splits an image, one paints edited slots."""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.models.interface import Arrays, Component, TensorSpec, image_spec
from saccade.models.scores.ari import adjusted_rand_index
from saccade.models.slot_attention.config import SlotConfig
from saccade.models.slot_attention.decoder import Painting
from saccade.models.slot_attention.initial import Rule, initial_states
from saccade.models.slot_attention.rounds import SlotState

MASK_SUM = 1e-5  # allowed distance of a cell's mask sum from 1
# Of images whose slots are computed together: activations of an encoder take memory per pixel.
_CHUNK, _CHUNK_PIXELS = 64, 2**17


class SlotFunction(nn.Module, ABC):
    """The function of a slot attention model, folded or not; its parts are the subclass's."""

    config: SlotConfig
    scale: Any
    encoder: Any
    attention: Any
    decoder: Any

    def forward(self, image: Tensor, initial_state: Tensor) -> tuple[SlotState, Tensor, Painting]:
        """Return the slots, the last round's attention before renormalization, and the painting.

        Shapes: image [b h w c], initial_state [b k s] -> SlotState, [b k n], Painting.
        """
        state, attention = self.slots(image, initial_state)
        return state, attention, self.decoder(state)

    def slots(self, image: Tensor, initial_state: Tensor) -> tuple[SlotState, Tensor]:
        """Return what `forward` does without the painting, which takes most of the time."""
        tokens = self.encoder(self.scale(image))
        state, attention = self.attention(tokens, initial_state.to(tokens.dtype))
        return state, attention[-1].mean(1)

    @abstractmethod
    def rule(self) -> Rule:
        """Return the rule for drawing initial states; see initial.py."""

    def components(self) -> tuple[Component, ...]:
        """Return the component that splits an image, and the decoder for edited slots."""
        rule = self.rule()
        return _apart(self, self.config, rule), _decode(self, self.config, rule)


def _apart(model: Any, config: SlotConfig, rule: Rule) -> Component:
    def run(image: Tensor, initial_state: Tensor) -> dict[str, Tensor]:
        state, attention, painting = model(image, initial_state)
        return _state_outputs(state) | {
            "masks": painting.masks,
            "attention": attention,
            "reconstruction": painting.reconstruction,
        }

    def real(arrays: Arrays) -> dict[str, np.ndarray]:
        image = arrays["image"]
        return {"image": image, "initial_state": _states(rule, config, len(image), 0)}

    def random(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        shape = (count, config.height_px, config.width_px, config.channels)
        image = rng.integers(0, 256, shape, dtype=np.uint8)
        seed = int(rng.integers(2**31))
        return {"image": image, "initial_state": _states(rule, config, count, seed)}

    return Component(
        role="",
        inputs=(
            image_spec(config),
            TensorSpec("initial_state", f"b k {config.state_dim}", "float32"),
        ),
        outputs=(*_state_names(config), "masks", "attention"),
        optional=("reconstruction",),
        run=run,
        real=real,
        random=random,
        score=_score,
        invariants={"masks_sum": _masks_sum},
    )


def _decode(model: Any, config: SlotConfig, rule: Rule) -> Component:
    names = _state_names(config)

    def run(*parts: Tensor, **named: Tensor) -> dict[str, Tensor]:
        given = dict(zip(names, parts, strict=False)) | named
        painting = model.decoder(SlotState(*(given[name] for name in names)))
        return {"reconstruction": painting.reconstruction, "masks": painting.masks}

    def real(arrays: Arrays) -> dict[str, np.ndarray]:
        states = _states(rule, config, len(arrays["image"]), 0)
        return _slots_of(model, arrays["image"], states, names)

    def random(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        shape = (count, config.slots)
        drawn = {
            "slots": rng.standard_normal((*shape, config.slot_dim)),
            "positions": rng.uniform(-1, 1, (*shape, 2)),
            "scales": rng.uniform(0.05, 0.5, (*shape, 2)),
        }
        return {name: drawn[name].astype(np.float32) for name in names}

    widths = {"slots": config.slot_dim, "positions": 2, "scales": 2}
    return Component(
        role="decode",
        inputs=tuple(TensorSpec(name, f"b k {widths[name]}", "float32") for name in names),
        outputs=("reconstruction", "masks"),
        run=run,
        real=real,
        random=random,
        invariants={"masks_sum": _masks_sum},
        every_budget=True,  # a budget is a number of rounds
    )


def _state_names(config: SlotConfig) -> tuple[str, ...]:
    names = ("slots", "positions", "scales")
    return names[: 1 + config.equivariant + config.scaled]


def _state_outputs(state: SlotState) -> dict[str, Tensor]:
    outputs = {"slots": state.slots, "positions": state.positions, "scales": state.scales}
    return {name: value for name, value in outputs.items() if value is not None}


def _states(rule: Rule, config: SlotConfig, count: int, seed: int) -> np.ndarray:
    return initial_states(rule, count, config.slots, seed=seed)


@torch.no_grad()
def _slots_of(
    model: Any, image: np.ndarray, states: np.ndarray, names: tuple[str, ...]
) -> dict[str, np.ndarray]:
    by_name: dict[str, list[np.ndarray]] = {name: [] for name in names}
    height, width = image.shape[1:3]
    chunk = max(1, min(_CHUNK, _CHUNK_PIXELS // (height * width)))
    for start in range(0, len(image), chunk):
        some = slice(start, start + chunk)
        state, _ = model.slots(torch.from_numpy(image[some]), torch.from_numpy(states[some]))
        for name, value in _state_outputs(state).items():
            by_name[name].append(value.float().numpy())
    return {name: np.concatenate(values) for name, values in by_name.items()}


def _score(outputs: Arrays, arrays: Arrays) -> float:
    """Return the FG-ARI of the masks; NaN if the calibration data has no true masks."""
    if "masks" not in arrays:
        return math.nan
    segments = outputs["masks"].argmax(1)
    return float(adjusted_rand_index(arrays["masks"], segments, foreground=True).mean())


def _masks_sum(inputs: Arrays, answers: Arrays, expected: Arrays) -> float:
    """Return how far the masks of a cell are from summing to 1 over slots."""
    return float(np.abs(answers["masks"].sum(1) - 1).max() / MASK_SUM)
