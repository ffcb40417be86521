# SPDX-License-Identifier: Apache-2.0
"""Splits of samples, given or stratified, the same on every machine."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from saccade.core.errors import SaccadeError

SPLITS = ("train", "validation", "test")
CALIBRATION_SAMPLES = 256  # in a checkpoint: as many as the parity gate requires


def drawn_rows(total: int, count: int | None) -> np.ndarray | None:
    """Return `count` of `total` rows, drawn with seed 0; None for all rows, in their order.

    A smaller draw is the beginning of a larger one. Files are often sorted by class, so the first
    rows would have the first classes only.

    Shapes: -> int64 [count].
    """
    if count is None or count >= total:
        return None
    return np.random.default_rng(0).permutation(total)[:count]


def stratified_split(
    labels: np.ndarray, *, validation: int, test: int, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return indices by split, each class in proportion; `validation` and `test` are exact counts.

    Samples are shuffled, sorted by class, and taken at even distances.
    Shapes: labels [n] -> three int64 vectors that partition range(n), each ascending.
    """
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    test_part, rest = _take_evenly(by_class, test)
    validation_part, train_part = _take_evenly(rest, validation)
    return {
        "train": np.sort(train_part),
        "validation": np.sort(validation_part),
        "test": np.sort(test_part),
    }


def rows_by_split(labels: np.ndarray, split_of: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Return the rows of the user's data by split.

    Rows are in the split that `split_of` says, an index into SPLITS; if no row is in validation, a
    tenth of the training rows is. Without it, 70 % are for training, 10 % for validation and 20 %
    for test. Rows are drawn per class with seed 0.

    Shapes: labels [n], split_of [n] -> int64 vectors, each ascending.
    """
    count = len(labels)
    if split_of is None:
        tenth, fifth = (max(1, count // share) if count > 2 else 0 for share in (10, 5))
        return stratified_split(labels, validation=tenth, test=fifth)
    rows = {name: np.flatnonzero(split_of == index) for index, name in enumerate(SPLITS)}
    if not len(rows["validation"]) and len(rows["train"]) > 1:
        train = rows["train"]
        parts = stratified_split(labels[train], validation=max(1, len(train) // 10), test=0)
        rows |= {name: train[parts[name]] for name in ("train", "validation")}
    return rows


def held_out(split_of: np.ndarray | None) -> str:
    """Return the split to score: test, or validation if no row is in test but some are in that."""
    if split_of is None or (split_of == 2).any() or not (split_of == 1).any():
        return "test"
    return "validation"


class EmptySplit(SaccadeError):
    """Raised for data that has no samples in a split."""


def chosen_rows(
    path: Path, split: str, labels: np.ndarray, split_of: np.ndarray | None = None
) -> np.ndarray:
    """Return the rows of a split; `all` is every row, those of training first.

    Shapes: -> int64 [rows].
    Raises: EmptySplit if the split is empty.
    """
    parts = rows_by_split(labels, split_of)
    rows = np.concatenate(list(parts.values())) if split == "all" else parts[split]
    if not len(rows):
        sizes = ", ".join(f"{name} {len(part):,}" for name, part in parts.items())
        filled = [name for name, part in parts.items() if len(part)]
        raise EmptySplit(
            f"{path}: its {split} split is empty ({sizes}). Add samples to it, or choose another "
            f"split ({', '.join(filled)}, or all) where the command has --split."
        )
    return rows


def calibration_rows(total: int, count: int = CALIBRATION_SAMPLES) -> np.ndarray:
    """Choose rows of a training split for calibration, the same on every call.

    If there are fewer rows than samples, rows repeat: the parity gate needs that many samples.

    Shapes: -> int64 [count].
    """
    return np.random.default_rng(0).permutation(total)[np.arange(count) % total]


def few_of_each(
    where: str, labels: np.ndarray, class_names: Sequence[str], shots: int, seed: int
) -> np.ndarray:
    """Draw `shots` samples of each class; with one seed, fewer shots are a part of more.

    Shapes: labels [n] int64, indices into class_names -> ascending rows [classes * shots] int64.
    Raises: SaccadeError naming the first class that has fewer samples.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for index, name in enumerate(class_names):
        rows = rng.permutation(np.flatnonzero(labels == index))
        if len(rows) < shots:
            raise SaccadeError(
                f"{where}: found {len(rows)} training samples of the class {name!r:.80}, expected "
                f"at least {shots} for --shots {shots}. Lower --shots, or add samples of it."
            )
        drawn.append(rows[:shots])
    return np.sort(np.concatenate(drawn))


def _take_evenly(items: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    places = ((2 * np.arange(count) + 1) * len(items)) // (2 * max(count, 1))
    taken = np.zeros(len(items), dtype=bool)
    taken[places] = True
    return items[taken], items[~taken]
