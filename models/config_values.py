# SPDX-License-Identifier: Apache-2.0
"""What every family's configuration does alike: check its fields, become JSON, come back."""

import difflib
from dataclasses import asdict, fields
from typing import Any, ClassVar, Self

from saccade.plugins.errors import SaccadeError


class ConfigValues:
    """The base of a frozen dataclass whose values JSON can hold."""

    called: ClassVar[str]  # what messages call the model

    def _expect(self, name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise SaccadeError(
                f"{self.called} configuration: {name} is {getattr(self, name)!r}, "
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

        Raises: SaccadeError on a key that no field has, or a value out of range.
        """
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        if unknown := sorted(set(values) - set(names)):
            close = difflib.get_close_matches(unknown[0], names, n=1)
            raise SaccadeError(
                f"{cls.called} configuration: unknown field {unknown[0]!r} ({len(unknown)} in "
                f"all){f', nearest is {close[0]!r}' if close else ''}. Correct its name; a "
                f"checkpoint with it comes from a newer saccade. Fields: {', '.join(names)}."
            )
        try:
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise SaccadeError(
                f"{cls.called} configuration: a value has the wrong type ({error}). "
                f"Write it with {cls.__name__}.to_dict."
            ) from error
