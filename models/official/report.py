# SPDX-License-Identifier: Apache-2.0
"""The report of a conversion: every key that is missing, unexpected or of the wrong shape."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.models.official.conversion import Converted
from saccade.models.official.tables import keys_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class KeyRow:
    """One key that does not fit; `ours` or `theirs` is empty if that side lacks it."""

    problem: str  # missing, unexpected, wrong shape
    ours: str
    theirs: str
    found: str = ""
    expected: str = ""


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion, whether or not a checkpoint was written."""

    source: str
    file: str
    sha256: str  # of the file
    family: str
    tensors: int  # of our model
    parameters: int
    rows: tuple[KeyRow, ...]  # keys that do not fit; if there are any, nothing was written
    ignored: dict[str, str]  # keys of the file left out on purpose, and why
    notes: tuple[str, ...]
    images: str = ""  # size, crop, interpolation, mean and std of the model's images
    images_from: str = ""
    out: str = ""  # the checkpoint written, and its hash
    out_sha256: str = ""
    exact: dict[str, Any] = field(default_factory=dict)  # what --numerics exact changed

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self) | {"rows": [asdict(row) for row in self.rows]}

    def to_text(self) -> str:
        """Return the report as text."""
        return "\n".join((*self._explained(), *self._results()))

    def results(self) -> str:
        """Return only what was asked for, without the explanations, for `-q`."""
        return "\n".join(self._results())

    def _explained(self) -> list[str]:
        lines = [
            f"{self.source}: {self.file} as {self.family}, {self.parameters:,} parameters "
            f"in {self.tensors} tensors"
        ]
        lines += [f"  {row.problem}: {_described(row)}" for row in self.rows]
        for why in dict.fromkeys(self.ignored.values()):
            keys = [key for key, reason in self.ignored.items() if reason == why]
            shown = ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")
            lines.append(f"  left out: {shown} ({len(keys)}): {why}")
        if self.images:
            lines.append(f"  images: {self.images} (from {self.images_from})")
        return lines + [f"  note: {note}" for note in self.notes]

    def _results(self) -> list[str]:
        lines = []
        if self.exact:
            lines.append(
                f"  exact numerics: {self.exact['output']} changes by at most "
                f"{self.exact['largest_change']:.3g} on {self.exact['samples']} samples "
                f"(largest value {self.exact['largest_value']:.3g})"
            )
        if self.out:
            lines.append(f"{self.out}: written.")
        return lines


class ConversionFailed(SaccadeError):
    """The file does not fit the model; `report` lists the differences."""

    def __init__(self, report: ConversionReport) -> None:
        self.report = report
        super().__init__(
            f"{report.file}: does not fit family '{report.family}' as read by SOURCE "
            f"'{report.source}': keys that differ: {len(report.rows)}. Nothing was written. Pass "
            f"the right source or --config for this file.\n{report.to_text()}"
        )


def compared(
    converted: Converted, expected: "Mapping[str, Tensor]", theirs: "Mapping[str, Tensor]"
) -> tuple[KeyRow, ...]:
    """Return every key that differs between our model (`expected`) and the file (`theirs`)."""
    rows = []
    used = {key for name in converted.names.values() for key in sources_of(name)}
    for ours, wanted in expected.items():
        name = converted.names.get(ours, "")
        if ours not in converted.weights:
            keys = sources_of(name) or keys_of(converted.rows, ours)
            used.update(keys)  # of several keys, those that the file has
            absent = [key for key in keys if key not in theirs]
            row = KeyRow("missing", ours, ", ".join(absent), expected=_shape(wanted))
            rows.append(row)
        elif converted.weights[ours].shape != wanted.shape:
            tensor = converted.weights[ours]
            rows.append(KeyRow("wrong shape", ours, name, _shape(tensor), _shape(wanted)))
    for ours in converted.weights.keys() - expected.keys():
        name = converted.names.get(ours, "")
        rows.append(KeyRow("unexpected", ours, name, _shape(converted.weights[ours])))
    left = [key for key in theirs if key not in used and key not in converted.ignored]
    rows += [KeyRow("unexpected", "", key, _shape(theirs[key])) for key in left]
    order = ("missing", "unexpected", "wrong shape")
    return tuple(sorted(rows, key=lambda row: (order.index(row.problem), row.ours, row.theirs)))


def sources_of(name: str) -> list[str]:
    """Return the keys of the file in a value of `Converted.names`: one, or several joined."""
    return [part.strip() for part in name.replace(" + ", ", ").split(", ") if part.strip()]


def _shape(tensor: "Tensor") -> str:
    return f"{tuple(tensor.shape)}"


def _described(row: KeyRow) -> str:
    key = row.theirs or row.ours
    if row.ours and row.theirs:
        key = f"{row.theirs} (our {row.ours})"
    if row.found and row.expected:
        return f"{key}: found {row.found}, expected {row.expected}"
    return f"{key} {row.found or row.expected}"
