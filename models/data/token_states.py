# SPDX-License-Identifier: Apache-2.0
"""The user's texts as states of a language model: .npz, .safetensors or .parquet of tokens."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from saccade.core.archives import array_names
from saccade.core.errors import Damaged, SaccadeError, ShapeError
from saccade.core.json_text import parse_json
from saccade.models.data.datasets import HELD_OUT
from saccade.models.data.loaded_once import keeps_loaded
from saccade.models.data.samples.arrays import check_whole, npz_arrays
from saccade.models.data.samples.images import KEPT_BYTES
from saccade.models.data.samples.labels import LabelColumn, numbered_classes
from saccade.models.data.samples.source import DataDescription, numbered, split_in, split_named
from saccade.models.data.splits import chosen_rows, held_out

_LENGTHS, _MASKS = "lengths", ("mask", "attention_mask")
_WRITE = "tokens, lengths and labels"
_LABELS = ("label", "labels")
_BLOCK = 64  # texts that are read at a time
SUFFIXES = (".npz", ".safetensors", ".parquet")


class StateRows:
    """The states of some texts, read when they are indexed; indexed like float32 [n t d].

    States of tokens outside a text are 0. With a mask, the tokens of a text are moved
    to the beginning.
    """

    dtype = np.dtype(np.float32)
    ndim = 3

    def __init__(
        self,
        read: Callable[[np.ndarray], np.ndarray],
        shape: tuple[int, ...],
        length: np.ndarray,
        mask: np.ndarray | None = None,
        rows: np.ndarray | None = None,
    ) -> None:
        self._read, self._length, self._mask = read, length, mask
        self._rows = np.arange(shape[0]) if rows is None else rows
        self.shape = (len(self._rows), *shape[1:])

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Return the size that all of them have in memory."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def part(self, places: Any) -> "StateRows":
        """Return some of the texts."""
        return StateRows(
            self._read, (len(self._length), *self.shape[1:]), self._length, self._mask,
            self._rows[places],
        )  # fmt: skip

    def __getitem__(self, key: Any) -> Any:
        """Return the states of these texts, or a part of the texts for a slice."""
        if isinstance(key, slice):
            return self.part(key)
        rows = self._rows[np.asarray(key)]
        if rows.ndim == 0:
            return self[np.asarray(key)[None]][0]
        tokens = self._read(rows).astype(np.float32, copy=False)
        if self._mask is not None:
            # A stable order puts the tokens of a text first and keeps their order.
            order = np.argsort(~self._mask[rows], axis=1, kind="stable")
            tokens = np.take_along_axis(tokens, order[..., None], axis=1)
        inside = np.arange(self.shape[1]) < self._length[rows][:, None]
        return np.where(inside[..., None], tokens, np.float32(0))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return all states as one array."""
        states = np.empty(self.shape, dtype=np.float32)
        for start in range(0, len(self), _BLOCK):
            places = np.arange(start, min(start + _BLOCK, len(self)))
            states[places] = self[places]
        return states if dtype is None else states.astype(dtype)


@dataclass(frozen=True)
class StateArrays:
    """All texts of a file.

    Shapes: tokens [n t d], of which the first length [n] (int64) are valid; labels [n] int64,
            indices into class_names; split_of [n] int8 or None.
    """

    tokens: StateRows
    length: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    split_of: np.ndarray | None


@dataclass(frozen=True)
class TokenStates:
    """One split of labeled texts.

    Shapes: tokens [n t d] float32, an array or `StateRows`, of which the first length [n] (int64)
            are valid; labels [n] int64, indices into class_names.
    """

    tokens: np.ndarray
    length: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    name: str
    sha256: str  # of this split's arrays and class names
    split: str = "test"

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """Return the arrays as inputs of a model of token states."""
        return {"tokens": self.tokens, "length": self.length}


@keeps_loaded
def token_states(path: str | Path, split: str, given: DataDescription | None = None) -> TokenStates:
    """Load one split of texts as states of a language model.

    Without given splits, they are drawn per class as for images: 70 % train, 10 % validation, 20 %
    test. States that do not fit into `KEPT_BYTES` stay in a .safetensors file; the other formats
    are read whole.

    Raises: SaccadeError if the file, an array or a value cannot be used, ShapeError if shapes
        differ.
    """
    path = Path(path)
    if not path.is_file():
        raise SaccadeError(
            f"data '{path}': is not a file. A model of token states needs an .npz, .safetensors "
            f"or .parquet file with {_WRITE}. docs/data.md shows how to write one."
        )
    states = state_arrays(path, given or DataDescription())
    if len(states.class_names) < 2:
        raise SaccadeError(
            f"{path}: found the class {states.class_names[0]}, expected at least two. Add samples "
            "of others."
        )
    split = {HELD_OUT: held_out(states.split_of), "val": "validation"}.get(split, split)
    rows = chosen_rows(path, split, states.labels, states.split_of)
    lazy, length = states.tokens.part(rows), states.length[rows]
    labels, names = states.labels[rows], states.class_names
    digest = hashlib.sha256(repr((lazy.shape, names)).encode())
    strange = 0
    for start in range(0, len(lazy), _BLOCK):
        block = lazy[np.arange(start, min(start + _BLOCK, len(lazy)))]
        strange += int((~np.isfinite(block)).any((1, 2)).sum())
        digest.update(block.tobytes())
    if strange:
        raise SaccadeError(
            f"{path}: found NaN or infinity within the length of {strange} of "
            "the texts. Write the states as the language model returned them."
        )
    for array in (length, labels):
        digest.update(np.ascontiguousarray(array).tobytes())
    kept = lazy.nbytes <= KEPT_BYTES
    tokens = np.asarray(lazy) if kept else cast(np.ndarray, lazy)
    return TokenStates(tokens, length, labels, names, path.name, digest.hexdigest(), split)


def state_arrays(path: Path, given: DataDescription) -> StateArrays:
    """Read a file of token states: an .npz, .safetensors or .parquet.

    Shapes: tokens [n t d] float32 or float16; lengths [n], or mask [n t] of 0 and 1; labels [n];
            class_names [k], split [n] of text (.npz only). A .parquet has the columns tokens (a
            list of lists per text), label and optionally split.
    Raises: SaccadeError if an array or a value cannot be used, ShapeError if shapes differ.
    """
    readers = {".safetensors": _safetensors, ".parquet": _parquet}
    return readers.get(path.suffix.lower(), _npz)(path, given)


def _npz(path: Path, given: DataDescription) -> StateArrays:
    try:
        names = set(array_names(path))
    except (OSError, ValueError):
        names = set()  # reading the arrays says what is wrong
    masked = _LENGTHS not in names and next((name for name in _MASKS if name in names), "")
    arrays = npz_arrays(path, ("tokens", masked or _LENGTHS, "labels"), ("split",))
    tokens = arrays["tokens"]
    _check_tokens(path, str(tokens.dtype), tokens.shape)
    return _states(path, arrays, lambda rows: tokens[rows], tokens.shape, given)


def _safetensors(path: Path, given: DataDescription) -> StateArrays:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="np")
        names = [*file.keys()]
        if missing := sorted({"tokens", "labels"} - {*names}):
            raise SaccadeError(
                f"{path}: found tensors {names!r:.200}, expected {_WRITE} ({missing[0]} is "
                "missing). Write it with safetensors.numpy.save_file."
            )
        tokens = file.get_slice("tokens")
        known = {"F32": "float32", "F16": "float16"}
        _check_tokens(path, known.get(tokens.get_dtype(), tokens.get_dtype()), tokens.get_shape())
        arrays = {name: file.get_tensor(name) for name in names if name != "tokens"}
        words = (file.metadata() or {}).get("class_names")
    except (OSError, SafetensorError) as error:
        raise Damaged(path, f"cannot be read as safetensors ({error!s:.200})") from error
    if words is not None:
        arrays["class_names"] = _words(path, words)

    def read(rows: np.ndarray) -> np.ndarray:
        return np.concatenate([tokens[row : row + 1] for row in rows.tolist()])

    return _states(path, arrays, read, tuple(tokens.get_shape()), given)


def _words(path: Path, text: str) -> np.ndarray:
    try:
        words = parse_json(text)
    except ValueError as error:
        raise SaccadeError(
            f"{path}: class_names in its metadata are not JSON ({error}). Write a list of text."
        ) from error
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise SaccadeError(f"{path}: class_names are {words!r:.80}, expected a list of text.")
    return np.array(words)


def _parquet(path: Path, given: DataDescription) -> StateArrays:
    from saccade.models.data.samples.columnar import ParquetFile, class_names_in, readable

    table = ParquetFile(path, split_in(path.name))
    names = table.schema().names
    label = next((name for name in _LABELS if name in names), None)
    if "tokens" not in names or label is None:
        raise SaccadeError(
            f"{path}: found the columns {names!r:.200}, expected tokens (a list of lists of "
            "numbers per text) and label. Rename the columns."
        )
    with readable(path, "Parquet"):
        texts = [_text_states(path, row, value) for row, value in enumerate(table.column("tokens"))]
        written = table.column(label).to_pylist()
        splits = table.column("split").to_pylist() if "split" in names else None
    if not texts:
        raise SaccadeError(f"{path}: found no rows, expected one per text.")
    width = texts[0].shape[1]
    if odd := [row for row, text in enumerate(texts) if text.shape[1] != width]:
        raise ShapeError(
            f"{path}: {numbered(odd[0])}: tokens are {texts[odd[0]].shape}, expected {width} "
            "values each, as in row 1."
        )
    column = LabelColumn()
    for row, value in enumerate(written):
        if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
            raise _refused(path, row, f"found the label {value!r:.80}, expected text or a number.")
        column.add(value)
    labels, classes = column.classes(
        given,
        lambda row, reason: _refused(path, row, reason),
        class_names_in(path, table.schema(), label),
    )
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    shape = (len(texts), int(lengths.max()), width)

    def read(rows: np.ndarray) -> np.ndarray:
        padded = np.zeros((len(rows), *shape[1:]), dtype=np.float32)
        for place, row in enumerate(rows.tolist()):
            padded[place, : lengths[row]] = texts[row]
        return padded

    split_of = None if splits is None else split_indices(path, splits)
    if split_of is None and table.split >= 0:
        split_of = np.full(len(texts), table.split, dtype=np.int8)
    return StateArrays(StateRows(read, shape, lengths), lengths, labels, classes, split_of)


def _text_states(path: Path, row: int, value: Any) -> np.ndarray:
    """Return the states of one text, from Arrow's list of lists, without a Python object each.

    Shapes: -> float32 [t d].
    """
    tokens: Any = value.values if value.is_valid else None
    flat = tokens.flatten() if hasattr(tokens, "flatten") else None
    if tokens is None or not flat or not len(tokens) or flat.null_count or len(flat) % len(tokens):
        raise _refused(path, row, "found no list of equal lists in tokens, expected the states.")
    sizes = {len(one) for one in (tokens[0], tokens[len(tokens) - 1])}
    try:
        states = flat.to_numpy(zero_copy_only=False).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise _refused(path, row, f"tokens are not numbers ({error!s:.80}).") from error
    if sizes != {len(flat) // len(tokens)}:
        raise _refused(path, row, "found lists of several lengths in tokens, expected one width.")
    return cast(np.ndarray, states.reshape(len(tokens), -1))


def _refused(path: Path, row: int, reason: str) -> SaccadeError:
    return SaccadeError(f"{path}: {numbered(row)}: {reason}")


def _states(
    path: Path,
    arrays: dict[str, np.ndarray],
    read: Callable[[np.ndarray], np.ndarray],
    shape: tuple[int, ...],
    given: DataDescription,
) -> StateArrays:
    """Check what belongs to the tokens: their number per text, labels, names and splits."""
    count, most = shape[:2]
    labels = arrays["labels"]
    check_whole(path, "labels", labels, count, "texts")
    mask_name = next((name for name in _MASKS if name in arrays), None)
    mask = None
    if _LENGTHS in arrays:
        lengths = arrays[_LENGTHS]
        check_whole(path, _LENGTHS, lengths, count, "texts")
    elif mask_name is None:
        raise SaccadeError(
            f"{path}: found neither lengths nor a mask, expected {_WRITE}. Add the number of "
            "tokens of each text, or the tokenizer's attention_mask."
        )
    else:
        mask = _checked_mask(path, mask_name, arrays[mask_name], (count, most))
        lengths = mask.sum(1)
    if not 1 <= lengths.min() <= lengths.max() <= most:
        raise SaccadeError(
            f"{path}: lengths range from {lengths.min()} to {lengths.max()}, expected 1 to {most}, "
            "the tokens per row. Leave texts without tokens out."
        )
    names = arrays.get("class_names") if given.labels is None else np.array(given.labels)
    classes, class_names = numbered_classes(str(path), labels, names)
    splits = arrays.get("split")
    split_of = None if splits is None else split_indices(path, splits.tolist())
    length = lengths.astype(np.int64)
    return StateArrays(
        StateRows(read, tuple(shape), length, mask), length, classes, class_names, split_of
    )


def _checked_mask(path: Path, name: str, mask: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    if mask.shape != shape or not np.isin(mask, (0, 1)).all():
        raise ShapeError(
            f"{path}: {name} is {mask.dtype} {mask.shape}, expected 0 or 1 for each of the tokens "
            f"{shape}."
        )
    return mask.astype(bool)


def split_indices(path: Path, names: list[Any]) -> np.ndarray:
    """Return the index in SPLITS of each of these names.

    Shapes: -> int8 [n].
    Raises: SaccadeError for another name, with its row.
    """
    found = [split_named(name) if isinstance(name, str) else None for name in names]
    if None in found:
        row = found.index(None)
        raise _refused(
            path,
            row,
            f"found the split {names[row]!r:.60}, expected train, validation or test. Correct it, "
            "or leave split out.",
        )
    return np.array(found, dtype=np.int8)


def _check_tokens(path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    if dtype not in ("float32", "float16"):
        raise SaccadeError(
            f"{path}: tokens are {dtype}, expected float32, the states of a language "
            "model. Convert them, for example with tokens.astype('float32')."
        )
    if len(shape) != 3 or 0 in shape:
        raise ShapeError(
            f"{path}: tokens are {tuple(shape)}, expected (texts, tokens, width), none of them 0. "
            "Pad every text to the longest one."
        )
