# SPDX-License-Identifier: Apache-2.0
"""The input of a converter, how it takes tensors, and its result."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.core import limits
from saccade.core.errors import SaccadeError
from saccade.models.official.tables import Row, Rows, filled, keys_of, matched, started
from saccade.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Original:
    """A checkpoint of the authors' code as read, with the user's options.

    `tensors` is a flat mapping by the names in the file: the names of a Flax tree are joined by
    '/', and the `module.` prefix of multi-GPU training is removed.
    """

    path: str  # for messages
    tensors: "Mapping[str, Tensor]"
    config: Mapping[str, Any] | None = None  # --config
    labels: tuple[str, ...] | None = None
    vocabulary: tuple[str, ...] | None = None
    attention: str | None = None  # softmax, sparsemax, tvmax
    lam: float | None = None
    backbone: "Mapping[str, Tensor] | None" = None  # --backbone, read like the checkpoint
    deterministic: bool = False  # --deterministic
    notes: tuple[str, ...] = ()  # about --config, for the report


@dataclass
class Reading:
    """The tensors of a file while tables translate them to ours."""

    path: str  # for messages
    tensors: "Mapping[str, Tensor]"
    weights: "dict[str, Tensor]" = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    file_keys: dict[str, str] = field(default_factory=dict)  # if they have been renamed
    prefix: str = ""  # before all other names in the file
    rows: Rows = ()  # of the tables so far

    @classmethod
    def renamed(cls, path: str, tensors: "Mapping[str, Tensor]", rows: Rows) -> "Reading":
        """Return a reading of tensors whose names a table brings to those of another source."""
        before = cls(path, tensors)
        before.take(rows)
        used = {key for name in before.names.values() for key in name.split(", ")}
        left = {key: value for key, value in tensors.items() if key not in used}
        return cls(path, before.weights | left, file_keys=before.names)

    def take(self, rows: Rows) -> None:
        """Make our tensors from theirs; of several rows for a tensor, the first that can wins.

        Keys that a row needs and the file lacks go into the report.
        """
        left = [key for key in self.tensors if self._file_key(key) not in self.ignored]
        for row in rows:
            first, *others = row.keys
            for key in left:
                values = matched(first, key)
                if values is None or (ours := filled(row.ours, values)) in self.weights:
                    continue
                keys = (key, *(filled(other, values) for other in others))
                self.names[ours] = ", ".join(map(self._file_key, keys))
                if all(key in self.tensors for key in keys):
                    self.weights[ours] = self._made(row, keys).contiguous()
        self.rows += rows

    def _file_key(self, key: str) -> str:
        return self.file_keys.get(key, self.prefix + key)

    def put(self, ours: str, value: "Tensor", *keys: str) -> None:
        """Store one of our tensors, with the keys of the file that it was made from."""
        self.weights[ours] = value
        self.names[ours] = ", ".join(map(self._file_key, keys))

    def ignore(self, pattern: str, reason: str) -> None:
        """Leave out every tensor whose name matches the regular expression."""
        for key in self.tensors:
            if re.fullmatch(pattern, key):
                self.ignored[self._file_key(key)] = reason

    def shape(self, key: str, axes: int | None = None) -> tuple[int, ...]:
        """Return the shape of a tensor that the file must have, with that number of axes.

        Raises: SaccadeError if there is no such tensor.
        """
        tensor = self.tensors.get(key)
        if tensor is None or axes not in (None, tensor.dim()):
            names = ", ".join(list(self.tensors)[:3])
            form = f" with {axes} axes" if axes is not None else ""
            raise SaccadeError(
                f"{self.path}: has no tensor {self._file_key(key)!r}{form} (found "
                f"{len(self.tensors)}, first: {names}). Choose the SOURCE that wrote this file "
                "(saccade inspect names it if it is known), or pass --checkpoint-key if the "
                "weights are nested under another key."
            )
        return tuple(tensor.shape)

    def size(self, key: str, axis: int = 0, default: int = 0) -> int:
        """Return the size of a tensor's axis; the default if the file lacks the tensor.

        Raises: SaccadeError if the tensor has no such axis.
        """
        if key not in self.tensors:
            return default
        own = self.shape(key)
        return own[axis] if -len(own) <= axis < len(own) else self.shape(key, abs(axis) + 1)[axis]

    def depth(self, template: str) -> int:
        """Return one more than the largest number for which the file has names that begin so.

        It is at most one more than any model may have.
        """
        numbers = (started(template, key) for key in self.tensors)
        most = max((number for number in numbers if number is not None), default=-1)
        return min(most, limits.LAYERS) + 1

    def _made(self, row: Row, keys: tuple[str, ...]) -> "Tensor":
        try:
            return row.made(*(self.tensors[key] for key in keys))
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(f"{key} {tuple(self.tensors[key].shape)}" for key in keys)
            raise SaccadeError(
                f"{self.path}: found {shapes}, which are not the shapes of this model "
                f"({str(error).splitlines()[0]:.100}). The weights and the JSON are from different "
                "models. Copy both from one source."
            ) from error

    def converted(
        self,
        official: Original,
        family: str,
        config: Any,
        images: tuple[Preprocessing | None, str] = (None, ""),
        notes: tuple[str, ...] = (),
        exact: Any = None,
    ) -> "Conversion":
        """Return the model of that configuration with all tensors taken."""
        return Conversion(
            family=family,
            config=config,
            weights=self.weights,
            names=self.names,
            preprocessing=images[0],
            images_from=images[1],
            labels=official.labels or (),
            ignored=self.ignored,
            notes=notes,
            exact=exact,
            rows=tuple(row.after(self.prefix) for row in self.rows),
        )


@dataclass(frozen=True)
class Conversion:
    """One of our models, and the origin of each of its tensors.

    `names` maps our keys to the keys of the file, `weights` has the tensors made from them.
    `ignored` maps keys of the file that are left out on purpose to the reason.
    """

    family: str
    config: Any  # the family's frozen dataclass
    weights: "dict[str, Tensor]"
    names: dict[str, str]
    preprocessing: Preprocessing | None
    images_from: str = ""  # origin of the preprocessing, for the report
    labels: tuple[str, ...] = ()
    ignored: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # for the card and the terminal
    # Further calibration arrays, all with the same first axis; empty: generated inputs.
    calibration: dict[str, np.ndarray] = field(default_factory=dict)
    # The configuration with the paper's formulas instead of approximations, if they differ.
    exact: Any = None
    rows: Rows = ()  # of the tables, which tell the keys of tensors that the file lacks


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
    converted: Conversion, expected: "Mapping[str, Tensor]", theirs: "Mapping[str, Tensor]"
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
    """Return the keys of the file in a value of `Conversion.names`: one, or several joined."""
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
