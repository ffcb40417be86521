# SPDX-License-Identifier: Apache-2.0
"""Configuration values common to all families: check the fields, become JSON, come back."""

import difflib
from dataclasses import asdict, fields
from functools import cache
from typing import Any, ClassVar, Self, get_type_hints

from saccade import limits
from saccade.errors import SaccadeError
from saccade.schema import WrongValue, typed


class ConfigValues:
    """The base of a frozen dataclass whose values JSON can hold.

    A field is a whole number, a number, a truth value, a text, or a tuple of one of these; its
    annotation says which of them it may be, as `saccade.schema` reads it.
    """

    called: ClassVar[str]  # what messages call the model
    # Fields that count layers, one after the other, or for each stage.
    layer_counts: ClassVar[tuple[str, ...]] = ()
    # Lists of as many values as there are slots or words, where others have one a layer.
    long_lists: ClassVar[tuple[str, ...]] = ()
    # Fields that count rounds, each written out when a model is exported.
    round_counts: ClassVar[tuple[str, ...]] = ()

    def _check_types(self, as_written: tuple[str, ...] = ()) -> None:
        """Every field as it is annotated: lists become tuples, whole numbers floats.

        Numbers of the fields `as_written` are left as they are.

        Raises: SaccadeError naming the first field that is something else, or beyond `limits`.
        """
        for name, kind in _kinds(type(self)).items():  # type: ignore[arg-type]
            value = getattr(self, name)
            if isinstance(value, list | tuple):
                of_texts = bool(value) and isinstance(value[0], str)
                most = limits.LIST if of_texts or name in self.long_lists else limits.LAYERS
                self._expect(name, len(value) <= most, f"at most {most} values")
            try:
                checked = typed(kind, value, "")
            except WrongValue as error:
                self._expect(name, False, error.expected)
            if name not in as_written:
                object.__setattr__(self, name, checked)
            self._check_sizes_of(name, checked if isinstance(checked, tuple) else (checked,))
        self._check_depth()

    def _check_sizes_of(self, name: str, values: tuple[Any, ...]) -> None:
        number = limits.SEED if name == "seed" else limits.SIZE
        for value in values:
            if type(value) is int:
                self._expect(name, abs(value) <= number, f"a whole number of at most {number}")
            elif type(value) is str:
                fits = len(value) <= limits.LABEL_CHARACTERS
                self._expect(name, fits, f"texts of at most {limits.LABEL_CHARACTERS} characters")

    def _check_depth(self) -> None:
        for name in (*self.layer_counts, *self.round_counts):
            fits = _total(getattr(self, name)) <= limits.LAYERS
            self._expect(name, fits, f"at most {limits.LAYERS} in all")

    def _check_pixels(self) -> None:
        """The channels of an image with their mean and std."""
        channels: int = self.channels  # type: ignore[attr-defined]
        mean: tuple[float, ...] = self.mean  # type: ignore[attr-defined]
        std: tuple[float, ...] = self.std  # type: ignore[attr-defined]
        self._expect("channels", channels in (1, 3), "1 or 3")
        self._expect("mean", len(mean) == channels, f"{channels} finite numbers, one a channel")
        self._expect("std", len(std) == channels, f"{channels} finite numbers, one a channel")
        self._expect("std", min(std) > 0, "above 0")
        low, high = limits.STD
        self._expect("std", low <= min(std) and max(std) <= high, f"from {low:g} to {high:g}")
        fits = max(map(abs, mean)) <= limits.MEAN
        self._expect("mean", fits, f"from {-limits.MEAN:g} to {limits.MEAN:g}")

    def _expect(self, name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise SaccadeError(
                f"{self.called} configuration: {name} is {getattr(self, name)!r:.200}, "
                f"expected {wanted}. Change that field."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The configuration that `to_dict` wrote.

        Raises: SaccadeError if it is not a dictionary, has a key that no field has, a value of
            another type, or one out of range.
        """
        if not isinstance(values, dict):
            raise SaccadeError(
                f"{cls.called} configuration: found {values!r:.100}, expected an object of "
                f"fields. Write it with {cls.__name__}.to_dict."
            )
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if unknown := sorted(set(values) - set(names), key=str):
            close = difflib.get_close_matches(str(unknown[0])[:100], names, n=1)
            raise SaccadeError(
                f"{cls.called} configuration: unknown field {unknown[0]!r:.100} ({len(unknown)} in "
                f"all){f', nearest is {close[0]!r}' if close else ''}. Correct its name; a "
                f"checkpoint with it comes from a newer saccade. Fields: {', '.join(names)}."
            )
        return cls(**values)


@cache
def _kinds(config: type[ConfigValues]) -> dict[str, Any]:
    """The annotation of each field."""
    hints = get_type_hints(config, include_extras=True)
    return {field.name: hints[field.name] for field in fields(config)}  # type: ignore[arg-type]


def _total(value: int | tuple[int, ...]) -> int:
    # A stage without blocks still has its own downsampling.
    return sum(max(1, size) for size in value) if isinstance(value, tuple) else value
