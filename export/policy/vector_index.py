# SPDX-License-Identifier: Apache-2.0
"""Vectors that the user stored, in parts: an index may be larger than the memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.archives import ArchiveRefused, read_arrays
from saccade.core.errors import SaccadeError, require
from saccade.exporter.policy.maps import ROUTER

MOST_VECTORS = 20_000_000
_PART = 16_384
_KINDS = ".npy, .npz (of `saccade embed`) or .parquet"


@dataclass(frozen=True)
class VectorIndex:
    """A file of vectors of this width, in the space of a variant with this hash.

    .npy files are memory-mapped and .parquet files read in batches; an .npz is read whole.
    """

    path: Path
    width: int
    sha256: str

    def parts(self) -> Iterator[np.ndarray]:
        """Yield the vectors with length 1.

        Shapes: -> float32 [at most 16,384, width].
        Raises: SaccadeError if the file is not an index of this width, has a vector that is not
            finite or has no length, too many vectors, or none.
        """
        read = {".npy": self._npy, ".npz": self._npz, ".parquet": self._parquet}
        if (own := read.get(self.path.suffix.lower())) is None or not self.path.is_file():
            raise self._refused("is not a file" if own else "has another ending")
        count = 0
        try:
            for part in own():
                yield self._checked(np.asarray(part), count)
                count += len(part)
        except (OSError, ValueError, ArchiveRefused) as error:
            raise self._refused(f"cannot be read ({error!s:.200})") from error
        if not count:
            raise self._refused("has no vectors")

    def _npy(self) -> Iterator[np.ndarray]:
        return _cut(np.lib.format.open_memmap(self.path, mode="r"))

    def _npz(self) -> Iterator[np.ndarray]:
        arrays = read_arrays(self.path, ("vectors", "sha256"))
        if "vectors" not in arrays:
            raise self._refused("has no array named vectors")
        if (made := str(arrays.get("sha256", self.sha256))) != self.sha256:
            raise self._refused(
                f"was made by another variant (SHA-256 {made[:12]}...) than the full model "
                f"({self.sha256[:12]}...)"
            )
        return _cut(arrays["vectors"])

    def _parquet(self) -> Iterator[np.ndarray]:
        file: Any = require("pyarrow.parquet", extra="bulk").ParquetFile(self.path)
        types: Any = require("pyarrow.types", extra="bulk")
        lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        columns = [
            field.name
            for field in file.schema_arrow
            if any(kind(field.type) for kind in lists) and types.is_floating(field.type.value_type)
        ]
        if len(columns) != 1:
            raise self._refused(f"has {len(columns)} columns of vectors: {', '.join(columns)}")
        for batch in file.iter_batches(_PART, columns=columns):
            values = batch.column(0).flatten().to_numpy(zero_copy_only=False)
            rows = len(batch)
            if len(values) != rows * self.width:
                raise self._refused(f"has lists of other lengths in {columns[0]}")
            yield values.reshape(rows, self.width)

    def _checked(self, part: np.ndarray, before: int) -> np.ndarray:
        if part.ndim != 2 or part.shape[1] != self.width or part.dtype.kind != "f":
            raise self._refused(f"has {part.dtype} of shape {list(part.shape)}")
        if before + len(part) > MOST_VECTORS:
            raise self._refused(f"has more than {MOST_VECTORS:,} vectors; draw some at random")
        lengths = np.linalg.norm(part.astype(np.float32), axis=1)
        if len(wrong := np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))):
            what = "only zeros" if lengths[wrong[0]] == 0 else "NaN or infinity"
            raise self._refused(f"has {what} in vector {before + wrong[0]:,}")
        return np.asarray(ROUTER.unit(part))

    def _refused(self, what: str) -> SaccadeError:
        return SaccadeError(
            f"--against-index {self.path}: {what}, expected {_KINDS} with vectors of "
            f"{self.width} numbers, as the full model embeds images."
        )


def _cut(vectors: np.ndarray) -> Iterator[np.ndarray]:
    whole = vectors if vectors.ndim == 2 else vectors[None]
    return (whole[at : at + _PART] for at in range(0, len(whole), _PART))
