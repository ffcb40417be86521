# SPDX-License-Identifier: Apache-2.0
"""Vectors that the user stored, in parts: an index may be larger than the memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.archives import ArchiveRefused, read_arrays
from saccade.core.errors import SaccadeError, require
from saccade.exporter.policy.maps import ROUTER

MOST_VECTORS = 20_000_000
_PART = 16_384


def stored_vectors(path: Path, width: int, sha256: str) -> Iterator[np.ndarray]:
    """Yield the vectors of a file with length 1, which a variant with this hash made.

    .npy files are memory-mapped and .parquet files read in batches; an .npz is read whole.
    Shapes: -> float32 [at most 16,384, width].
    Raises: SaccadeError if the file is not an index of this width, has a vector that is not finite
        or has no length, too many vectors, or none.
    """
    count = 0
    try:
        for part in _parts(path, sha256):
            if part.ndim != 2 or part.shape[1] != width or part.dtype.kind != "f":
                raise ValueError(f"has {part.dtype} of shape {list(part.shape)}")
            lengths = np.linalg.norm(part.astype(np.float32), axis=1)
            if len(wrong := np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0)))):
                raise ValueError(f"has NaN, infinity or only zeros in row {count + wrong[0]:,}")
            if (count := count + len(part)) > MOST_VECTORS:
                raise ValueError(f"has more than {MOST_VECTORS:,} vectors")
            yield ROUTER.unit(part)
        if not count:
            raise ValueError("has no vectors")
    except (OSError, ValueError, ArchiveRefused) as error:
        reason = getattr(error, "strerror", None) or error
        raise SaccadeError(
            f"--against-index {path}: {reason!s:.200}; expected vectors of {width} numbers in a "
            ".npy, .parquet, or .npz of `saccade embed`, as the full model embeds images."
        ) from error


def _parts(path: Path, sha256: str) -> Iterator[np.ndarray]:
    ending = path.suffix.lower()
    if ending == ".parquet":
        yield from _columns(path)
        return
    if ending not in (".npy", ".npz"):
        raise ValueError(f"is a file of another kind, {ending or 'without an ending'}")
    if ending == ".npy":
        vectors = np.lib.format.open_memmap(path, mode="r")
    else:
        arrays = read_arrays(path, ("vectors", "sha256"))
        vectors, made = arrays.get("vectors", np.empty(0)), str(arrays.get("sha256", sha256))
        if made != sha256:
            raise ValueError(f"is of a variant with SHA-256 {made[:12]}..., not {sha256[:12]}...")
    for at in range(0, len(vectors) or 1, _PART):
        yield vectors[at : at + _PART]


def _columns(path: Path) -> Iterator[np.ndarray]:
    file: Any = require("pyarrow.parquet", extra="bulk").ParquetFile(path)
    types = {field.name: field.type for field in file.schema_arrow}
    found = [name for name, kind in types.items() if "list<" in str(kind)]
    if len(found) != 1:
        raise ValueError(f"has {len(found)} columns of lists ({', '.join(found)}), expected one")
    for batch in file.iter_batches(_PART, columns=found):
        yield np.stack(batch.column(0).to_numpy(zero_copy_only=False))
