# SPDX-License-Identifier: Apache-2.0
"""The function of a second-order transformer, its component, and the invariant of exact svPN."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from saccade.core.errors import SaccadeError
from saccade.models.interface import Arrays, Component, Invariant, TensorSpec, image_spec
from saccade.models.sot.config import SoTConfig
from saccade.models.sot.head import Head, HeadOutput, head_outputs

INVARIANT_SAMPLES = 64  # the invariant recomputes their spectra
# Relative to the largest: allowed distance of a singular value from s^alpha, after raising both to
# the power 1/alpha, where rounding is about the same for small and large values.
INVARIANT_TOLERANCE = 1e-3
REMEDY = (
    "Exact svPN amplifies rounding where a sample's covariance has singular values near 0. Export "
    "--budget fast,class (at a resolution: r160fast), or bound the slope in training: saccade "
    "train sot --set svpn_ridge=0.001."
)


class SoTFunction(nn.Module):
    """The function of a SoT, folded or not; its trunk and its head are the subclass's."""

    config: SoTConfig
    trunk: nn.Module
    head: Head

    def forward(self, x: Tensor, length: Tensor | None = None) -> Tensor:
        """Return the logits.

        Shapes: x image [b h w c], values 0 to 255 of any type, or tokens [b n d] with length [b]
                -> [b classes].
        """
        return self.outputs(x, length)["logits"]

    def answer(self, x: Tensor, length: Tensor | None = None) -> HeadOutput:
        """Return the logits of both kinds of tokens, which training with late fusion needs."""
        return self._answer(x, length)[0]

    def outputs(self, x: Tensor, length: Tensor | None = None) -> dict[str, Tensor]:
        """Return all exported outputs of one pass."""
        answer, attention = self._answer(x, length)
        outputs = head_outputs(answer, self.config.fusion)
        return outputs if attention is None else outputs | {"attention": attention}

    def _answer(self, x: Tensor, length: Tensor | None) -> tuple[HeadOutput, Tensor | None]:
        if self.config.input != "tokens":
            tokens = self.trunk(x)
            return self.head(tokens.class_tokens, tokens.words), tokens.attention
        if length is None:
            raise SaccadeError(
                "length: found none, but texts differ in length. Pass the number of valid tokens, "
                "[b] int64."
            )
        weight = next(self.head.parameters())
        tokens, kept = self.trunk(x.to(weight.dtype), length)
        return self.head(tokens.class_tokens, tokens.words, kept), None

    def components(self) -> tuple[Component, ...]:
        """Return the only component: image, or tokens and length, to logits and embedding."""
        return (_component(self),)


def _component(model: SoTFunction) -> Component:
    config = model.config
    optional = ["attention"] if config.input == "image" and config.shape.specials else []
    invariants: dict[str, Invariant] = {}
    if config.second_order:
        optional += ["covariance", "pooled"]
        if config.normalization == "svpn":
            invariants["svpn_singular_values"] = SpectrumInvariant(model)
    text = config.input == "tokens"

    def run_image(image: Tensor) -> dict[str, Tensor]:
        return model.outputs(image)

    def run_text(tokens: Tensor, length: Tensor) -> dict[str, Tensor]:
        return model.outputs(tokens, length)

    return Component(
        role="",
        inputs=_text_inputs(config) if text else (image_spec(config),),
        outputs=("logits", "probabilities", "embedding"),
        optional=tuple(optional),
        run=run_text if text else run_image,
        random=_random_text(config) if text else None,
        invariants=invariants,
        remedy=REMEDY if invariants and not config.svpn_ridge else "",
    )


def _text_inputs(config: SoTConfig) -> tuple[TensorSpec, TensorSpec]:
    states = TensorSpec("tokens", f"b {config.max_tokens} {config.dim}", "float32")
    return states, TensorSpec("length", "b", "int64")


def _random_text(config: SoTConfig) -> Any:
    def random(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
        shape = (count, config.max_tokens, config.dim)
        tokens = rng.standard_normal(shape).astype(np.float32)
        length = rng.integers(1, config.max_tokens + 1, count)
        return {"tokens": tokens, "length": length.astype(np.int64)}

    return random


class SpectrumInvariant:
    """Compares singular values of the pooled matrices with those that exact svPN should give.

    The covariances come from the file if it returns them, else from the model that made it. The
    pooled matrices come from the file, else from the end of its embedding, which contains them
    scaled.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._config: SoTConfig = model.config
        self._last: tuple[Any, np.ndarray] | None = None

    def __call__(self, inputs: Arrays, answers: Arrays, expected: Arrays) -> float:
        """Return the worst distance from the invariant, as a share of what is allowed."""
        alpha = self._config.alpha
        if "covariance" in answers:
            before = _spectra(answers["covariance"][:INVARIANT_SAMPLES])
        else:
            before = self._spectra_before(inputs)
        powers = self._powers(before)
        if "pooled" in answers:
            after = _spectra(answers["pooled"][:INVARIANT_SAMPLES])
        else:
            after = _spectra(self._embedded(answers["embedding"][:INVARIANT_SAMPLES]))
            length = np.sqrt(np.square(powers).sum((1, 2), keepdims=True))
            norm = np.sqrt(np.square(after).sum((1, 2), keepdims=True))
            after = after * length / np.maximum(norm, np.finfo(np.float64).tiny)
        roots = powers ** (1 / alpha)
        largest = np.maximum(roots[..., :1], np.finfo(np.float64).tiny)
        return float((np.abs(after ** (1 / alpha) - roots) / largest).max() / INVARIANT_TOLERANCE)

    def _powers(self, values: np.ndarray) -> np.ndarray:
        """Return what `ExactSvPN` makes of singular values.

        Shapes: [n heads k] -> the same.
        """
        config = self._config
        ridge = config.svpn_ridge * np.sqrt(np.square(values).sum(-1, keepdims=True))
        bounded = np.hypot(values, ridge)
        return values * np.where(bounded > 0, bounded, 1) ** (config.alpha - 1)

    def _embedded(self, embedding: np.ndarray) -> np.ndarray:
        heads, m, n = self._config.pool_heads, self._config.m, self._config.n
        return embedding[:, -heads * m * n :].reshape(-1, heads, m, n)

    def _spectra_before(self, inputs: Arrays) -> np.ndarray:
        first = next(iter(inputs.values()))
        # Called several times with the same reference, once per way to batch it.
        if self._last is None or self._last[0] is not first:
            names = (spec.name for spec in self._model.components()[0].inputs)
            arrays = (np.ascontiguousarray(inputs[name][:INVARIANT_SAMPLES]) for name in names)
            with torch.no_grad():
                outputs = self._model.outputs(*map(torch.from_numpy, arrays))
            self._last = (first, _spectra(outputs["covariance"].numpy()))
        return self._last[1]


def _spectra(matrices: np.ndarray) -> np.ndarray:
    """Return the singular values of each matrix; NaN where one has NaN or an infinity.

    Shapes: [n heads m n] -> [n heads k].
    """
    finite = np.isfinite(matrices).all((-2, -1))[..., None]
    known = np.where(finite[..., None], matrices, 0).astype(np.float64)
    return np.where(finite, np.linalg.svd(known, compute_uv=False), np.nan)
