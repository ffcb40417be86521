# SPDX-License-Identifier: Apache-2.0
"""The user's texts as states of a language model: an .npz of tokens, lengths and labels."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from saccade.errors import SaccadeError, ShapeError
from saccade.models.data.samples.arrays import check_whole, npz_arrays
from saccade.models.data.user_data import labelled_part

_ARRAYS = ("tokens", "lengths", "labels")


@dataclass(frozen=True)
class TokenStates:
    """One split of labeled texts.

    Shapes: tokens [n t d] float32, of which the first length [n] (int64) are valid; labels [n]
            int64, indices into class_names.
    """

    tokens: np.ndarray
    length: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    name: str
    sha256: str  # of this split's arrays and class names

    @property
    def inputs(self) -> dict[str, np.ndarray]:
        """Return the arrays as inputs of a model of token states."""
        return {"tokens": self.tokens, "length": self.length}


def token_states(path: str | Path, split: str) -> TokenStates:
    """Load one split of an .npz with `tokens`, `lengths`, `labels` and optional `class_names`.

    Splits are drawn per class as for images: 70 % train, 10 % validation, 20 % test. Values beyond
    a text's length may be anything; they are set to 0.

    Shapes: tokens [n t d] float32, lengths and labels [n] of any integer type, class_names [k].
    Raises: SaccadeError if the file, an array or a value cannot be used, ShapeError if shapes
        differ.
    """
    path = Path(path)
    if not path.is_file():
        raise SaccadeError(
            f"data '{path}': is not a file. A model of token states needs an .npz with "
            f"{', '.join(_ARRAYS)}. Write it with numpy.savez."
        )
    arrays = npz_arrays(path, _ARRAYS)
    tokens, lengths, labels = (arrays[name] for name in _ARRAYS)
    _check_tokens(path, tokens)
    for name, array in (("lengths", lengths), ("labels", labels)):
        check_whole(path, name, array, len(tokens), "texts")
    most = tokens.shape[1]
    if not 1 <= lengths.min() <= lengths.max() <= most:
        raise SaccadeError(
            f"{path}: lengths range from {lengths.min()} to {lengths.max()}, expected 1 to {most}, "
            "the tokens per row. Leave texts without tokens out."
        )
    rows, names = labelled_part(path, labels, arrays.get("class_names"), split)
    tokens, length = tokens[rows].astype(np.float32, copy=False), lengths[rows].astype(np.int64)
    inside = np.arange(most) < length[:, None]
    strange = ~np.isfinite(tokens).all(-1) & inside
    if strange.any():
        raise SaccadeError(
            f"{path}: found NaN or infinity within the length of {int(strange.any(1).sum())} of "
            "the texts. Write the states as the language model returned them."
        )
    tokens = np.where(inside[..., None], tokens, np.float32(0))
    labels = labels[rows].astype(np.int64)
    digest = hashlib.sha256(repr((tokens.shape, names)).encode())
    for array in (tokens, length, labels):
        digest.update(np.ascontiguousarray(array).tobytes())
    return TokenStates(tokens, length, labels, names, path.name, digest.hexdigest())


def _check_tokens(path: Path, tokens: np.ndarray) -> None:
    if tokens.dtype not in (np.float32, np.float16):
        raise SaccadeError(
            f"{path}: tokens are {tokens.dtype}, expected float32, the states of a language "
            "model. Convert them, for example with tokens.astype('float32')."
        )
    if tokens.ndim != 3 or 0 in tokens.shape:
        raise ShapeError(
            f"{path}: tokens are {tokens.shape}, expected (texts, tokens, width), none of them 0. "
            "Pad every text to the longest one."
        )
