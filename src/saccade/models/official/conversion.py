# SPDX-License-Identifier: Apache-2.0
"""Input of a converter, the way it takes tensors, and its answer."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from saccade.errors import SaccadeError
from saccade.models.preprocessing import Preprocessing

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Official:
    """A checkpoint of the authors' code as it was read, and what the user said beside it.

    `tensors` are flat, by the names in the file: a Flax tree's joined by '/', without the
    `module.` that several GPUs leave.
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


# A pattern of a whole key of the file, and our key.
Rules = Iterable[tuple[str, str]]
# Our key, the key of the file, and what is done to the tensor.
Row = tuple[str, str, "Callable[[Tensor], Tensor]"]


@dataclass
class Reading:
    """A file's tensors on their way to our names."""

    path: str  # for messages
    tensors: "Mapping[str, Tensor]"
    weights: "dict[str, Tensor]" = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    file_keys: dict[str, str] = field(default_factory=dict)  # where they have been renamed

    def rename(self, rules: Rules) -> None:
        """Take every tensor whose name one of the rules knows."""
        compiled = [(re.compile(pattern), ours) for pattern, ours in rules]
        for key, value in self.tensors.items():
            for pattern, ours in compiled:
                if match := pattern.fullmatch(key):
                    self.put(match.expand(ours), value, key)

    def put(self, ours: str, value: "Tensor", *keys: str) -> None:
        """One of our tensors, and the keys of the file that it was made of."""
        self.weights[ours] = value
        self.names[ours] = ", ".join(self.file_keys.get(key, key) for key in keys)

    def ignore(self, pattern: str, reason: str) -> None:
        """Leave out every tensor of that name."""
        for key in self.tensors:
            if re.fullmatch(pattern, key):
                self.ignored[self.file_keys.get(key, key)] = reason

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor that the file must have.

        Raises: SaccadeError if it has none of that name.
        """
        if key not in self.tensors:
            names = ", ".join(list(self.tensors)[:3])
            raise SaccadeError(
                f"{self.path}: has no tensor {key!r} (found {len(self.tensors)}, first: {names}). "
                "Name the SOURCE that the file comes from, and --checkpoint-key where the weights "
                "lie under a name."
            )
        return tuple(self.tensors[key].shape)

    def depth(self, pattern: str) -> int:
        """One more than the largest number that the pattern's group finds."""
        matches = (re.match(pattern, key) for key in self.tensors)
        return 1 + max((int(match[1]) for match in matches if match), default=-1)

    def take(self, rows: Iterable[Row], prefix: str = "") -> None:
        """Make our tensors of theirs row by row; a name that the file lacks is kept for the report.

        `prefix` stands in front of their names in the file.
        """
        for ours, theirs, made in rows:
            if theirs in self.tensors:
                self.weights[ours] = made(self.tensors[theirs]).float().contiguous()
            self.names[ours] = prefix + theirs

    def converted(
        self,
        official: Official,
        family: str,
        config: Any,
        images: tuple[Preprocessing | None, str] = (None, ""),
        notes: tuple[str, ...] = (),
        exact: Any = None,
    ) -> "Converted":
        """The model of that configuration with everything that was taken."""
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
    """One of our models, and where each of its tensors came from.

    `names` maps our keys to the keys of the file, `weights` holds what was made of them. Keys of
    the file that are rightly left out stand in `ignored` with the reason.
    """

    family: str
    config: Any  # the family's frozen dataclass
    weights: "dict[str, Tensor]"
    names: dict[str, str]
    preprocessing: Preprocessing | None
    images_from: str = ""  # what the preprocessing is taken from, for the report
    labels: tuple[str, ...] = ()
    ignored: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # for the card and the terminal
    # Further calibration arrays, all with the same first axis; none: generated inputs.
    calibration: dict[str, np.ndarray] = field(default_factory=dict)
    # The configuration with the paper's own formulas in place of approximations, if they differ.
    exact: Any = None
