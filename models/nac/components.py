# SPDX-License-Identifier: Apache-2.0
"""The function of a NAC, and its component: inputs and outputs."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn, stack
from torch.nn import functional as F

from saccade.core.errors import SaccadeError
from saccade.models.interface import Arrays, Component, TensorSpec
from saccade.models.layers.attention_invariants import SUM_TOLERANCE
from saccade.models.nac.config import NACConfig
from saccade.models.nac.generator import CircuitInputs
from saccade.models.nac.kernel import Kernel
from saccade.models.nac.layers import without_padding

OUTPUTS = ("logits", "probabilities", "embedding")
SECOND = "_b"  # suffix of the names of a pair's second input and its length
_DTYPES = {"image": "uint8", "bytes": "uint8", "characters": "int64"}


class NACFunction(nn.Module, ABC):
    """The function of a NAC, folded or not; how it runs a circuit is the subclass's.

    Every method that runs it takes `x` (image [b h w c] with values 0 to 255 of any type, tokens
    [b n token_dim], points [b n 3], characters or bytes [b n]; a pair [b 2 ...]), `length` [b] or
    [b 2] of at least 1 (valid tokens), `condition` [b m condition_dim] and `condition_length` [b]
    (conditional NAC).
    """

    config: NACConfig
    kernel: Kernel
    tokenizer: nn.Module

    def inputs(
        self,
        x: Tensor,
        length: Tensor | None = None,
        condition: Tensor | None = None,
        condition_length: Tensor | None = None,
    ) -> CircuitInputs:
        """Return the tokens of `x` with the rest of what a circuit depends on."""
        tokens = without_padding(self.tokenizer(x, length), length)
        return CircuitInputs(tokens, length, condition, condition_length)

    def details(
        self,
        x: Tensor,
        length: Tensor | None = None,
        condition: Tensor | None = None,
        condition_length: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return all exported outputs of one pass.

        Shapes: -> logits and probabilities [b classes], embedding [b dim] of length 1, attention
                [b u n] of the read-in, and link [b u u], the probabilities of links (absent if
                links are dense).
        """
        inputs = self.inputs(x, length, condition, condition_length)
        state, attention, biases = self.run(inputs)
        logits = self.logits(state)
        answer = {
            "logits": logits,
            "probabilities": logits.softmax(-1),
            "embedding": F.normalize(state, dim=-1),
            "attention": attention,
        }
        if biases is not None:
            links = self.links_of(biases)[..., : self.config.modules]
            answer["link"] = links.expand(attention.shape[0], -1, -1)
        return answer

    @abstractmethod
    def run(self, inputs: CircuitInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the state before the head, the read-in's weights, the logarithms of the links."""

    @abstractmethod
    def logits(self, state: Tensor) -> Tensor:
        """Return the head's logits of a state."""

    def links_of(self, biases: Tensor) -> Tensor:
        """Return the link probabilities of the third result of `run`."""
        return self.kernel.links(biases)

    def components(self) -> tuple[Component, ...]:
        """Return the only component: its input, a length if that varies, and its condition.

        Raises: SaccadeError if the configuration leaves open an axis that a file has to fix.
        """
        config = self.config

        def run(**inputs: Tensor) -> dict[str, Tensor]:
            return self.details(*model_arguments(config, inputs))

        def random(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
            return random_inputs(config, rng, count)

        dense = config.connectivity == "dense"
        component = Component(
            role="",
            inputs=input_specs(config),
            outputs=OUTPUTS,
            run=run,
            optional=("attention",) if dense else ("attention", "link"),
            random=random,
            invariants={"attention_sums_to_one": attention_sums_to_one},
        )
        return (component,)


def input_specs(config: NACConfig) -> tuple[TensorSpec, ...]:
    """Return the specifications of the inputs.

    Raises: SaccadeError if the configuration leaves an axis open.
    """
    places = f"b {config.max_tokens}"
    axes = {
        "image": f"b {config.height_px} {config.width_px} {config.channels}",
        "tokens": f"{places} {config.token_dim}",
        "points": f"{places} 3",
        "characters": places,
        "bytes": places,
    }[config.input]
    varies = config.input != "image"
    if varies and not config.max_tokens:
        raise SaccadeError(_open_axis("max_tokens", "tokens an input has"))
    specs = []
    for name in input_names(config):
        specs.append(TensorSpec(name, axes, _DTYPES.get(config.input, "float32")))
    if varies:
        specs += [TensorSpec(name, "b", "int64") for name in length_names(config)]
    if config.conditional and config.condition_dim:
        if not config.condition_tokens:
            raise SaccadeError(_open_axis("condition_tokens", "condition tokens an input has"))
        axes = f"b {config.condition_tokens} {config.condition_dim}"
        specs.append(TensorSpec("condition", axes, "float32"))
        specs.append(TensorSpec("condition_length", "b", "int64"))
    return tuple(specs)


def input_names(config: NACConfig) -> tuple[str, ...]:
    """Return image, or image and image_b; likewise for other kinds of input."""
    return (config.input, config.input + SECOND)[: config.input_sets]


def length_names(config: NACConfig) -> tuple[str, ...]:
    """Return length, or length and length_b."""
    return ("length", "length" + SECOND)[: config.input_sets]


def model_arguments(config: NACConfig, inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return the arguments of a NAC's methods, given tensors by input name.

    Shapes: -> x, length, condition, condition_length; the inputs of a pair stacked as [b 2 ...].
    """

    def together(names: tuple[str, ...]) -> Tensor | None:
        if names[0] not in inputs:
            return None
        values = [inputs[name] for name in names]
        return values[0] if len(values) == 1 else stack(values, 1)

    conditions = (inputs.get("condition"), inputs.get("condition_length"))
    return (together(input_names(config)), together(length_names(config)), *conditions)


def random_inputs(config: NACConfig, rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Draw inputs of all lengths, with random padding, as callers may send it."""
    inputs: dict[str, np.ndarray] = {}
    for spec in input_specs(config):
        shape = (count, *(int(axis) for axis in spec.shape[1:]))
        if spec.name.startswith("length"):
            inputs[spec.name] = rng.integers(1, config.max_tokens + 1, count)
        elif spec.name == "condition_length":
            inputs[spec.name] = rng.integers(1, config.condition_tokens + 1, count)
        elif spec.dtype == "uint8":
            inputs[spec.name] = rng.integers(0, 256, shape, dtype=np.uint8)
        elif spec.dtype == "int64":
            inputs[spec.name] = rng.integers(0, len(config.vocabulary), shape)
        else:
            inputs[spec.name] = rng.standard_normal(shape, dtype=np.float32)
    for name in length_names(config):
        symbols = inputs.get(name.replace("length", "characters"))
        if symbols is not None:
            beyond = np.arange(config.max_tokens) >= inputs[name][:, None]
            symbols[beyond] = rng.integers(-(2**40), 2**40, int(beyond.sum()))
    return inputs


def attention_sums_to_one(inputs: Arrays, answers: Arrays, expected: Arrays) -> float:
    """Return how far sums of read-in weights are from 1, as a share of what is allowed."""
    if "attention" not in answers:
        return 0.0
    total = answers["attention"].sum(-1, dtype=np.float64)
    return float(np.abs(total - 1).max(initial=0.0) / SUM_TOLERANCE)


def _open_axis(field: str, what: str) -> str:
    return (
        f"NAC configuration: {field} is 0, so a file cannot fix how many {what}. "
        f"Set {field} to the largest number; shorter inputs are padded and have a length."
    )
