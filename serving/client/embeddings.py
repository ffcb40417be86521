# SPDX-License-Identifier: Apache-2.0
"""Embeddings and the variant in whose space they are; different spaces never mix."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from saccade.core.archives import read_arrays
from saccade.core.errors import Damaged, SaccadeError
from saccade.core.files import refuse_existing, write_atomically

_SCHEMA = "saccade.embeddings 2"
_AXES = {"vectors": 2, "names": 1}  # each of the others is one string
_BY = "by"  # of vectors that were mapped: the variant and hash that computed each, [n 2]
_FIELDS = ("schema", "vectors", "names", "variant", "sha256", "slots_sha256")


@dataclass(frozen=True)
class Embeddings:
    """One vector per image or text, and the variant in whose space they are, with its hash.

    It computed them, unless `by` has the variant and hash that computed each, mapped into its
    space. `certified` is False if a policy's certificate does not cover all of them.
    Shapes: vectors float32 [n d].
    """

    vectors: np.ndarray
    variant: str
    sha256: str
    slots_sha256: str = ""  # of the slots in a code; empty if codes do not consist of slots
    by: tuple[tuple[str, str], ...] = ()
    certified: bool = True

    @property
    def makers(self) -> tuple[tuple[str, str], ...]:
        """The variant and hash that computed each vector."""
        return self.by or ((self.variant, self.sha256),) * len(self.vectors)

    def similarity(self, other: "Embeddings") -> np.ndarray:
        """Return the cosine similarity of each of these vectors with each of the others.

        Shapes: -> float32 [n m].
        Raises: SaccadeError if they do not come from the same slots of the same variant.
        """
        self.check_comparable(other)
        mine, theirs = (vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
                        for vectors in (self.vectors, other.vectors))  # fmt: skip
        return np.asarray(mine @ theirs.T, np.float32)

    def check_comparable(self, other: "Embeddings") -> None:
        """Refuse to compare vectors that mean different things.

        Raises: SaccadeError if variant, hash or slots differ.
        """
        if self.slots_sha256 != other.slots_sha256:
            raise SaccadeError(
                f"Codes of {self.variant} and {other.variant} consist of different slots "
                f"({self.slots_sha256[:12] or 'none'}..., {other.slots_sha256[:12] or 'none'}...) "
                "and cannot be compared. Embed both with the same --budget."
            )
        if (self.variant, self.sha256) != (other.variant, other.sha256):
            raise SaccadeError(
                f"Codes of {self.variant} ({self.sha256[:12]}...) and {other.variant} "
                f"({other.sha256[:12]}...) cannot be compared: they come from different variants. "
                "Embed both with the same --budget."
            )


def load_embeddings(path: Path) -> tuple[Embeddings, tuple[str, ...]]:
    """Read the embeddings in a file and the names of their images.

    Raises: SaccadeError if the file is missing or contains something else.
    """
    try:
        data = read_arrays(path)
        missing = [field for field in _FIELDS if field not in data]
        if missing or str(data["schema"]) != _SCHEMA:
            raise ValueError(f"it has no {', '.join(missing) or _SCHEMA}")
        strange = [field for field in _FIELDS if data[field].ndim != _AXES.get(field, 0)]
        if strange or data["vectors"].dtype.kind != "f":
            raise ValueError(f"its {(strange or ['vectors'])[0]} have another shape or type")
        names = tuple(str(name) for name in data["names"])
        variant, sha256, slots = (str(data[name]) for name in ("variant", "sha256", "slots_sha256"))
        by = tuple((str(name), str(digest)) for name, digest in data.get(_BY, ()))
        if len(by) not in (0, len(data["vectors"])):
            raise ValueError(f"it has {len(by)} variants for {len(data['vectors'])} vectors")
        embeddings = Embeddings(data["vectors"], variant, sha256, slots, by)
    except (OSError, ValueError) as error:
        raise SaccadeError(
            f"{path}: found no embeddings of `saccade embed` ({error}). Pass a file that it wrote."
        ) from error
    if embeddings.vectors.ndim != 2 or len(names) != len(embeddings.vectors):
        raise Damaged(
            path, f"found {len(names)} names for vectors of shape {list(embeddings.vectors.shape)}"
        )
    return embeddings, names


def check_embeddings_file(path: Path, *, append: bool = False, force: bool = False) -> None:
    """Check that the file can be written, before any image is sent.

    Raises: SaccadeError if it exists and neither `append` nor `force` is true.
    """
    if append and force:
        raise SaccadeError(
            "Found both --append and --force, expected at most one. Pass --append to add to the "
            "file, or --force to replace it."
        )
    if append and path.exists():
        load_embeddings(path)
        return
    if path.exists() and not force:
        raise SaccadeError(
            f"{path}: exists already. Pass --append to add to it, --force to replace it, or "
            "another path with --out."
        )
    refuse_existing(path, force=force)


def save_embeddings(
    path: Path,
    embeddings: Embeddings,
    names: Sequence[str],
    *,
    append: bool = False,
    force: bool = False,
) -> None:
    """Write vectors, names, the variant and its hash to an .npz file, completely or not at all.

    Raises: SaccadeError if the file exists, or contains embeddings of another variant.
    """
    path = Path(path)
    check_embeddings_file(path, append=append, force=force)
    if len(names) != len(embeddings.vectors):
        raise SaccadeError(
            f"Found {len(names)} names for {len(embeddings.vectors)} vectors, expected one each."
        )
    vectors, all_names = embeddings.vectors, list(names)
    if append and path.exists():
        before, known = load_embeddings(path)
        _check_same(path, before, embeddings)
        if before.by or embeddings.by:
            embeddings = replace(embeddings, by=before.makers + embeddings.makers)
        vectors = np.concatenate([before.vectors, vectors])
        all_names = [*known, *names]
    file = io.BytesIO()
    np.savez(
        file,
        schema=np.array(_SCHEMA),
        vectors=vectors.astype(np.float32),
        names=np.array(all_names, dtype=np.str_),
        variant=np.array(embeddings.variant),
        sha256=np.array(embeddings.sha256),
        slots_sha256=np.array(embeddings.slots_sha256),
        **({_BY: np.array(embeddings.by)} if embeddings.by else {}),
    )
    write_atomically(path, file.getvalue())


def _check_same(path: Path, before: Embeddings, new: Embeddings) -> None:
    made_by = [
        (embeddings.variant, embeddings.sha256, embeddings.slots_sha256)
        for embeddings in (before, new)
    ]
    if made_by[0] != made_by[1]:
        raise SaccadeError(
            f"{path}: found embeddings of {before.variant} ({before.sha256[:12]}...), but the new "
            f"ones are of {new.variant} ({new.sha256[:12]}...). Embeddings of different variants "
            "cannot be compared. Embed with the same --budget or into its --space, or write to "
            "another file."
        )
