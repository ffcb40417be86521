# SPDX-License-Identifier: Apache-2.0
"""What the model's input is, and which images are refused before they become it."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from saccade.plugins.errors import SaccadeError

RESIZES = ("nearest", "bilinear", "bicubic", "lanczos")


@dataclass(frozen=True)
class Preprocessing:
    """From an encoded image to the model's uint8 [b, h, w, c], and the normalisation behind it.

    The mean and std are applied by the model itself: (x / 255 - mean) / std, per channel.
    Units:  mean and std as fractions of full white; caps in MiB, megapixels, pixels, images.
    Raises: SaccadeError if a value is out of range.
    """

    height_px: int
    width_px: int
    channels: int  # 1: grey, 3: red, green, blue
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: str = "bilinear"
    max_image_mib: int = 16
    max_megapixels: int = 50
    max_side_px: int = 16384
    max_images: int = 64

    def __post_init__(self) -> None:
        for name in ("height_px", "width_px", "max_image_mib", "max_megapixels", "max_side_px"):
            self._require(_is_count(getattr(self, name)), name, "a whole number of at least 1")
        self._require(_is_count(self.max_images), "max_images", "a whole number of at least 1")
        self._require(self.channels in (1, 3), "channels", "1 (grey) or 3 (colour)")
        self._require(self.resize in RESIZES, "resize", " or ".join(RESIZES))
        each = f"{self.channels} finite numbers, one a channel"
        self._require(_are_finite(self.mean, self.channels), "mean", each)
        self._require(_are_finite(self.std, self.channels), "std", each)
        self._require(min(self.std) > 0, "std", "above 0")

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON holds them."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocessing":
        """The inverse of `to_dict`.

        Raises: SaccadeError if a key is unknown or missing, or a value is out of range.
        """
        if not isinstance(values, dict):
            raise SaccadeError(f"Preprocessing: found {values!r}, expected a JSON object.")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        missing = sorted(known - set(values))
        if unknown or missing:
            raise SaccadeError(
                f"Preprocessing: unknown keys {unknown}, missing keys {missing}. "
                "The file was written by another version of saccade: write it again with this one."
            )
        pairs = {key: values[key] for key in ("mean", "std")}
        if not all(isinstance(value, list | tuple) for value in pairs.values()):
            raise SaccadeError(f"Preprocessing: mean and std are {pairs}, expected two lists.")
        return cls(**values | {key: tuple(value) for key, value in pairs.items()})

    def _require(self, holds: bool, name: str, expected: str) -> None:
        if not holds:
            raise SaccadeError(
                f"Preprocessing: {name} is {getattr(self, name)!r}, expected {expected}."
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_finite(values: tuple[float, ...], count: int) -> bool:
    return len(values) == count and all(
        isinstance(value, int | float) and math.isfinite(value) for value in values
    )
