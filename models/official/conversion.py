# SPDX-License-Identifier: Apache-2.0
"""The input of a converter, how it takes tensors, and its result."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.core import limits
from saccade.core.errors import SaccadeError
from saccade.models.official.tables import Row, Rows, filled, matched, started
from saccade.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Official:
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
        official: Official,
        family: str,
        config: Any,
        images: tuple[Preprocessing | None, str] = (None, ""),
        notes: tuple[str, ...] = (),
        exact: Any = None,
    ) -> "Converted":
        """Return the model of that configuration with all tensors taken."""
        return Converted(
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
class Converted:
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
