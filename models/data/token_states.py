# SPDX-License-Identifier: Apache-2.0
"""The user's texts as states of a language model: .npz, .safetensors or .parquet of tokens."""

import hashlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from saccade.core.errors import SaccadeError, ShapeError
from saccade.core.json_text import parse_json
from saccade.models.data.datasets import rows_of_split
from saccade.models.data.options import keeps_loaded
from saccade.models.data.samples.arrays import (
    ArrayForm,
    LabeledArrays,
    check_names,
    names_in,
    npz_arrays,
)
from saccade.models.data.samples.formats import TableRows
from saccade.models.data.samples.images import KEPT_BYTES
from saccade.models.data.samples.source import DataDescription, reading, split_in
from saccade.models.data.samples.tables import ParquetTable, readable

_LENGTHS, _MASKS = "lengths", ("mask", "attention_mask")
_TOKENS = ArrayForm(
    "float32 float16",
    "n t d",
    "float32 (texts, tokens, width), none of them 0: the states of a language model, each text "
    "padded to the longest one",
)
_MASK = ArrayForm("int uint bool float", "n t", "0 or 1 for each of the tokens ({n}, {t})")
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

    def text(self, row: int) -> np.ndarray:
        """Return the valid states of one text."""
        states: np.ndarray = self[row]
        return states[: self._length[self._rows[row]]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return all states as one array."""
        states = np.empty(self.shape, dtype=np.float32)
        for start in range(0, len(self), _BLOCK):
            places = np.arange(start, min(start + _BLOCK, len(self)))
            states[places] = self[places]
        return states if dtype is None else states.astype(dtype)


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
            "or .parquet file with tokens, lengths and labels. docs/data.md shows how to write one."
        )
    states = open_states(path, given or DataDescription())
    if len(states.class_names) < 2:
        raise SaccadeError(
            f"{path}: found the class {states.class_names[0]}, expected at least two. Add samples "
            "of others."
        )
    split, rows = rows_of_split(states, split)
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


def open_states(path: Path, given: DataDescription) -> "StateArrays | StateTable":
    """Read a file of token states: an .npz, .safetensors or .parquet.

    Raises: SaccadeError if an array or a value cannot be used, ShapeError if shapes differ.
    """
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return StateTable(path, given)
    read = _safetensors if suffix == ".safetensors" else _npz
    return StateArrays(path, *read(path), given)


class StateArrays(LabeledArrays):
    """The texts of an .npz or .safetensors.

    Shapes: tokens [n t d] float32 or float16, read by `read`; lengths [n], or mask [n t] of 0 and
            1; labels [n]; class_names [k], split [n] of text (.npz only).
    """

    def __init__(
        self,
        path: Path,
        tokens: Any,
        dtype: str,
        arrays: dict[str, np.ndarray],
        given: DataDescription,
    ) -> None:
        shape = tuple(tokens.shape if isinstance(tokens, np.ndarray) else tokens.get_shape())
        _TOKENS.check(path, "tokens", dtype, shape)
        super().__init__(path, arrays, shape[0], given)
        mask = self._mask(shape[:2])
        if mask is not None:
            arrays[_LENGTHS] = mask.sum(1)
        self.length = self.lengths(_LENGTHS, shape[1])

        def read(rows: np.ndarray) -> np.ndarray:
            return np.concatenate([tokens[row : row + 1] for row in rows.tolist()])

        self.tokens = StateRows(read, shape, self.length, mask)

    def _mask(self, shape: tuple[int, ...]) -> np.ndarray | None:
        name = next((name for name in _MASKS if name in self.arrays), None)
        if name is None or _LENGTHS in self.arrays:
            return None
        mask = self.arrays[name]
        binary = str(mask.dtype) if np.isin(mask, (0, 1)).all() else "other values"
        _MASK.check(self.path, name, binary, mask.shape, n=shape[0], t=shape[1])
        return mask.astype(bool)


class StateTable(TableRows):
    """The texts of a .parquet: tokens (a list of lists per text), label and optionally split."""

    def __init__(self, path: Path, given: DataDescription) -> None:
        table = ParquetTable(path, split_in(path.name))
        super().__init__(path, [table], ("tokens", "labels"), given)
        with readable(path):
            texts = [
                _text_states(value, partial(self.refused, row))
                for row, value in enumerate(table.column("tokens"))
            ]
        width = texts[0].shape[1]
        if odd := [row for row, text in enumerate(texts) if text.shape[1] != width]:
            raise ShapeError(
                f"{path}: {self.row_name(odd[0])}: tokens are {texts[odd[0]].shape}, expected "
                f"{width} values each, as in the rows before. Write one width."
            )
        self.length = np.array([len(text) for text in texts], dtype=np.int64)
        shape = (len(texts), int(self.length.max()), width)

        def read(rows: np.ndarray) -> np.ndarray:
            states = np.zeros((len(rows), *shape[1:]), dtype=np.float32)
            for place, row in enumerate(rows.tolist()):
                states[place, : len(texts[row])] = texts[row]
            return states

        self.tokens = StateRows(read, shape, self.length)


_Read = tuple[Any, str, dict[str, np.ndarray]]  # the tokens, their type, and the other arrays


def _npz(path: Path) -> _Read:
    arrays = npz_arrays(path, _wanted(names_in(path)), ("split",))
    tokens = arrays.pop("tokens")
    return tokens, str(tokens.dtype), arrays


def _safetensors(path: Path) -> _Read:
    from safetensors import SafetensorError, safe_open

    with reading(path, "safetensors", SafetensorError):
        file = safe_open(path, framework="np")
        names = [*file.keys()]
        check_names(path, names, _wanted(names), "safetensors.numpy.save_file(tensors, path)")
        tokens = file.get_slice("tokens")
        arrays = {name: file.get_tensor(name) for name in names if name != "tokens"}
        words = (file.metadata() or {}).get("class_names")
    if words is not None:
        arrays["class_names"] = _words(path, words)
    dtype = tokens.get_dtype()
    return tokens, {"F32": "float32", "F16": "float16", "F64": "float64"}.get(dtype, dtype), arrays


def _wanted(names: Collection[str]) -> tuple[str, ...]:
    """Return the arrays that a file must have; a mask, or a tokenizer's, says lengths too."""
    masks = [name for name in _MASKS if name in names and _LENGTHS not in names]
    return ("tokens", masks[0] if masks else _LENGTHS, "labels")


def _words(path: Path, text: str) -> np.ndarray:
    with reading(f"{path}: class_names in its metadata", "a JSON list of text"):
        words = parse_json(text)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"found {words!r:.80}")
    return np.array(words)


def _text_states(value: Any, refused: Callable[[str], SaccadeError]) -> np.ndarray:
    """Return the states of one text, from Arrow's list of lists, without a Python object each.

    Shapes: -> float32 [t d].
    """
    tokens: Any = value.values if value.is_valid else None
    flat = tokens.flatten() if hasattr(tokens, "flatten") else None
    if tokens is None or not flat or not len(tokens) or flat.null_count or len(flat) % len(tokens):
        raise refused("found no list of equal lists in tokens, expected the states.")
    sizes = {len(one) for one in (tokens[0], tokens[len(tokens) - 1])}
    try:
        states = flat.to_numpy(zero_copy_only=False).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise refused(f"tokens are not numbers ({error!s:.80}).") from error
    if sizes != {len(flat) // len(tokens)}:
        raise refused("found lists of several lengths in tokens, expected one width.")
    return cast(np.ndarray, states.reshape(len(tokens), -1))
