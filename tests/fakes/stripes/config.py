# SPDX-License-Identifier: Apache-2.0
"""Everything that is decided about a model of stripes before its weights exist."""

from dataclasses import dataclass
from typing import ClassVar

from saccade.core.schema import Count
from saccade.models.budget import ComputeBudget, fraction_budget
from saccade.models.config_values import ConfigValues

SOURCE = "nobody 2026, Stripes"
SIDE_PX = 8
LABELS = ("across", "down")


@dataclass(frozen=True)
class StripesConfig(ConfigValues):
    """A layer of units on the pixels, and a classifier on those."""

    called: ClassVar[str] = "Stripes"
    height_px: ClassVar[int] = SIDE_PX
    width_px: ClassVar[int] = SIDE_PX
    channels: ClassVar[int] = 1
    mean: ClassVar[tuple[float, ...]] = (0.5,)
    std: ClassVar[tuple[float, ...]] = (0.5,)

    units: Count = 8
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_types()

    def budgets(self) -> tuple[ComputeBudget, ...]:
        return tuple(self.budget(text) for text in ("1", "0.5"))

    def budget(self, text: str) -> ComputeBudget:
        return fraction_budget(text, self.units, "units")


PRESETS = {"stripes-tiny": StripesConfig()}
