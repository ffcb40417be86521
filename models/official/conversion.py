# SPDX-License-Identifier: Apache-2.0
"""The input of a converter, how it takes tensors, and its result."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.core.errors import SaccadeError
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


# A pattern that matches a whole key of the file, and our key.
Rules = Iterable[tuple[str, str]]
# Our key, the key of the file, or several, and the function applied to their tensors.
Row = tuple[str, str | tuple[str, ...], "Callable[..., Tensor]"]


@dataclass
class Reading:
    """The tensors of a file while they are renamed to ours."""

    path: str  # for messages
    tensors: "Mapping[str, Tensor]"
    weights: "dict[str, Tensor]" = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    file_keys: dict[str, str] = field(default_factory=dict)  # if they have been renamed

    def rename(self, rules: Rules) -> None:
        """Take every tensor whose name matches one of the rules."""
        compiled = [(re.compile(pattern), ours) for pattern, ours in rules]
        for key, value in self.tensors.items():
            for pattern, ours in compiled:
                if match := pattern.fullmatch(key):
                    self.put(match.expand(ours), value, key)

    def put(self, ours: str, value: "Tensor", *keys: str) -> None:
        """Store one of our tensors, with the keys of the file that it was made from."""
        self.weights[ours] = value
        self.names[ours] = ", ".join(self.file_keys.get(key, key) for key in keys)

    def ignore(self, pattern: str, reason: str) -> None:
        """Leave out every tensor whose name matches the pattern."""
        for key in self.tensors:
            if re.fullmatch(pattern, key):
                self.ignored[self.file_keys.get(key, key)] = reason

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor that the file must have.

        Raises: SaccadeError if there is no tensor of that name.
        """
        if key not in self.tensors:
            names = ", ".join(list(self.tensors)[:3])
            raise SaccadeError(
                f"{self.path}: has no tensor {key!r} (found {len(self.tensors)}, first: {names}). "
                "Choose the SOURCE that wrote this file (saccade inspect names it if it is known), "
                "or pass --checkpoint-key if the weights are nested under another key."
            )
        return tuple(self.tensors[key].shape)

    def depth(self, pattern: str) -> int:
        """Return one more than the largest number that the pattern's group matches."""
        matches = (re.match(pattern, key) for key in self.tensors)
        return 1 + max((int(match[1]) for match in matches if match), default=-1)

    def take(self, rows: Iterable[Row], prefix: str = "") -> None:
        """Make our tensors from theirs, row by row; names that the file lacks go into the report.

        `prefix` precedes their names in the file.
        """
        for ours, theirs, made in rows:
            keys = (theirs,) if isinstance(theirs, str) else theirs
            if all(key in self.tensors for key in keys):
                self.weights[ours] = self._made(made, keys).float().contiguous()
            self.names[ours] = ", ".join(prefix + key for key in keys)

    def _made(self, made: "Callable[..., Tensor]", keys: tuple[str, ...]) -> "Tensor":
        tensors = [self.tensors[key] for key in keys]
        try:
            return made(*tensors)
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
