# SPDX-License-Identifier: Apache-2.0
"""The table of int8 recipes: how numbers become 8-bit integers, in the order they are tried."""

from dataclasses import dataclass, replace
from typing import Literal

from saccade.core.machine import INT8

# Where int8 is to run: TensorRT needs symmetric scales, CPUs multiply unsigned by signed integers.
Target = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class QuantizationRecipe:
    """One way to quantize a graph. Weights are symmetric with one scale per output channel.

    Units: `percentile` of an activation's values are within its range, 100 are all of them.
    """

    name: str
    unsigned: bool = True  # activations are 0 to 255 with a zero point, otherwise -127 to 127
    smooth: bool = False  # move outliers of normalized activations into the weights
    percentile: float = 100
    float_share: float = 0.0  # of the layers, those with the largest errors stay float32
    weight_bits: int = 8


_SMOOTH = QuantizationRecipe("smooth", smooth=True)
_SIGNED = QuantizationRecipe("symmetric", unsigned=False)
_SIGNED_SMOOTH = replace(_SIGNED, name="symmetric-smooth", smooth=True)
# Each recipe is at least as fast as the ones after it.
RECIPES: dict[Target, tuple[QuantizationRecipe, ...]] = {
    "cpu": (
        QuantizationRecipe("unsigned"),
        _SMOOTH,
        replace(_SMOOTH, name="smooth-percentile", percentile=99.99),
        replace(_SMOOTH, name="smooth-islands", float_share=0.1),
        replace(_SMOOTH, name="smooth-wide-islands", float_share=0.25),
    ),
    "gpu": (
        _SIGNED,
        _SIGNED_SMOOTH,
        replace(_SIGNED_SMOOTH, name="symmetric-smooth-islands", float_share=0.1),
        replace(_SIGNED_SMOOTH, name="symmetric-smooth-wide-islands", float_share=0.25),
    ),
}


def recipes_for(
    target: Target, instruction_sets: tuple[str, ...]
) -> tuple[QuantizationRecipe, ...]:
    """Return the recipes for a target, in the order to try; a CPU's depend on its instructions.

    AVX2 alone sums two products in 16 bits, which saturates unless the weights have only 7 bits.
    """
    recipes = RECIPES[target]
    if target == "cpu" and INT8.isdisjoint(instruction_sets):
        recipes = tuple(
            replace(recipe, name=f"{recipe.name}-7bit", weight_bits=7) for recipe in recipes
        )
    return recipes
