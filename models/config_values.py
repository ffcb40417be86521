# SPDX-License-Identifier: Apache-2.0
"""Configurations of all families: check the fields, convert them to JSON and back."""

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from saccade.core import limits
from saccade.core.checks import nearest
from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, WrongValue, field_kinds, typed
from saccade.models.budget import Budget, ComputeBudget
from saccade.models.resnet_sizes import STRIDE, sizes_of
from saccade.models.resolution import TokenGrid, resolution_budget


@dataclass(frozen=True)
class ImageFields:
    """The fields of a configuration about the input image."""

    height_px: Count
    width_px: Count
    channels: int  # 1: gray, 3: red, green, blue
    mean: tuple[float, ...]  # per channel, of pixels scaled to [0, 1]
    std: tuple[float, ...]


def shared_fields(kind: Any, config: Any) -> dict[str, Any]:
    """Return the fields of `kind`, a dataclass, from a configuration that has them too."""
    return {field.name: getattr(config, field.name) for field in fields(kind)}


class ConfigValues:
    """Base of a frozen dataclass whose values can be written as JSON.

    A field is an integer, a number, a boolean, a string, or a tuple of one of these. Its
    annotation says which values are allowed, as `saccade.core.schema` reads it.
    """

    called: ClassVar[str]  # the model's name in messages
    # Fields that count layers, in all or for each stage.
    layer_counts: ClassVar[tuple[str, ...]] = ()
    # Lists with one value per slot or word, where other lists have one per layer.
    long_lists: ClassVar[tuple[str, ...]] = ()
    # Fields that count rounds; an export unrolls each of them.
    round_counts: ClassVar[tuple[str, ...]] = ()

    def _check_types(self, as_written: tuple[str, ...] = ()) -> None:
        """Check every field against its annotation: lists become tuples, integers floats.

        The numbers of lists `as_written` are not converted.

        Raises: SaccadeError naming the first field of another type, or beyond `limits`.
        """
        for name, kind in field_kinds(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                of_texts = bool(value) and isinstance(value[0], str)
                most = limits.LIST if of_texts or name in self.long_lists else limits.LAYERS
                self._expect(name, len(value) <= most, f"at most {most} values")
            try:
                checked = typed(kind, value, "")
            except WrongValue as error:
                self._expect(name, False, error.expected)
            object.__setattr__(self, name, tuple(value) if name in as_written else checked)
            self._check_sizes_of(name, checked if isinstance(checked, tuple) else (checked,))
        self._check_depth()

    def _check_sizes_of(self, name: str, values: tuple[Any, ...]) -> None:
        number = limits.SEED if name == "seed" else limits.SIZE
        for value in values:
            if type(value) is int:
                self._expect(name, abs(value) <= number, f"a whole number of at most {number}")
            elif type(value) is str:
                fits = len(value) <= limits.LABEL_CHARACTERS
                self._expect(name, fits, f"strings of at most {limits.LABEL_CHARACTERS} characters")

    def _check_depth(self) -> None:
        for name in (*self.layer_counts, *self.round_counts):
            fits = _total(getattr(self, name)) <= limits.LAYERS
            self._expect(name, fits, f"at most {limits.LAYERS} in all")

    def _check_pixels(self) -> None:
        """Check the channels of an image with their mean and std."""
        assert isinstance(self, ImageFields)
        channels, mean, std = self.channels, self.mean, self.std
        self._expect("channels", channels in (1, 3), "1 or 3")
        self._expect("mean", len(mean) == channels, f"{channels} finite numbers, one per channel")
        self._expect("std", len(std) == channels, f"{channels} finite numbers, one per channel")
        self._expect("std", min(std) > 0, "above 0")
        low, high = limits.STD
        self._expect("std", low <= min(std) and max(std) <= high, f"from {low:g} to {high:g}")
        fits = max(map(abs, mean)) <= limits.MEAN
        self._expect("mean", fits, f"from {-limits.MEAN:g} to {limits.MEAN:g}")

    def _check_resnet(self, name: str, grid: tuple[int, int]) -> None:
        """Check that the image and the features of its cells are those of a ResNet."""
        for side, cells in zip(("height_px", "width_px"), grid, strict=True):
            expected = f"{STRIDE} px for each of {cells} cells ({name})"
            self._expect(side, getattr(self, side) == STRIDE * cells, expected)
        self._expect("channels", self.channels == 3, f"3 ({name})")  # type: ignore[attr-defined]
        width = sizes_of(name).features
        fits = self.feature_dim == width  # type: ignore[attr-defined]
        self._expect("feature_dim", fits, f"{width} ({name})")

    def _expect(self, name: str, fits: bool, expected: str) -> None:
        if not fits:
            raise SaccadeError(
                f"{self.called} configuration: {name} is {getattr(self, name)!r:.200}, "
                f"expected {expected}. Change that field."
            )

    @property
    def token_grid(self) -> TokenGrid | None:
        """The tokens of an image; None if the model reads images of one size, or none."""
        return None

    def budgets(self) -> tuple[ComputeBudget, ...]:
        """Return the default variants, largest first; here only the whole model."""
        return (ComputeBudget("b1000", Budget(1), 1, 1, "model"),)

    def budget(self, text: str) -> ComputeBudget:
        """Return the budget that a user's text means; here only the whole model.

        Raises: SaccadeError listing what is accepted.
        """
        if found := resolution_budget(self, text):
            return found
        (whole,) = ConfigValues.budgets(self)
        if text.strip() not in ("1", "1.0", "whole", whole.label):
            raise SaccadeError(
                f"budget {text!r}: a {self.called} model is exported whole. "
                "Leave --budget out, or pass 1."
            )
        return whole

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Return the configuration that `to_dict` wrote.

        Raises: SaccadeError if it is not a dictionary, has an unknown key, a value of another
            type, or one out of range.
        """
        if not isinstance(values, dict):
            raise SaccadeError(
                f"{cls.called} configuration: found {values!r:.100}, expected an object of "
                f"fields. Write it with {cls.__name__}.to_dict."
            )
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if unknown := sorted(set(values) - set(names), key=str):
            close = nearest(str(unknown[0]), names)
            raise SaccadeError(
                f"{cls.called} configuration: unknown field {unknown[0]!r:.100} ({len(unknown)} in "
                f"all){f', nearest is {close!r}' if close else ''}. Correct its name; if a "
                f"checkpoint has it, a newer saccade wrote it. Fields: {', '.join(names)}."
            )
        return cls(**values)


def _total(value: int | tuple[int, ...]) -> int:
    # A stage without blocks still has its own downsampling.
    return sum(max(1, size) for size in value) if isinstance(value, tuple) else value
