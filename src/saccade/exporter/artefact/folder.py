# SPDX-License-Identifier: Apache-2.0
"""The folder that `saccade export` writes: read, checked and hashed once, and handed on."""

import time
from collections.abc import Iterable
from copy import copy
from functools import cache, cached_property
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.exporter.artefact.frontier import FILE_NAME, Entry, Frontier, merged, read_frontier
from saccade.exporter.artefact.manifest import SQUASHING, SUFFIX, FileEntry, Manifest, manifest_of
from saccade.exporter.artefact.variant import known_roles
from saccade.exporter.artefact.variant_files import VariantFiles, grouped
from saccade.files import json_bytes, sha256_of, write_atomically
from saccade.leftovers import only_writer
from saccade.models.checkpoint import Checkpoint, load
from saccade.schema import AGAIN, read_json

# Two changes within one tick of a file system's clock leave the same times; it has 10 ms or less.
_TICK_NS = 50_000_000


class ArtefactFolder:
    """Manifests, files, measurements and checkpoint of one model's variants.

    What is read is kept. A file is hashed when it is first asked for, and again only where it may
    have changed since: whoever opens it finds the bytes that its manifest promises.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._hashed: dict[FileEntry, tuple[int, ...]] = {}
        self._squashing: set[str] = set()  # names of variants whose manifest is of that version
        self._load = cache(load)

    @classmethod
    def open(cls, folder: "ArtefactFolder | Path | str") -> "ArtefactFolder":
        """The folder itself, or that of this path; nothing is read yet."""
        return folder if isinstance(folder, ArtefactFolder) else cls(folder)

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def manifests(self) -> tuple[Manifest, ...]:
        """Largest budget first; the files are not opened.

        The components of a variant are neighbours, first the one that answers a plain request.

        Raises: SaccadeError if there is none, an artefact lacks its manifest, or the manifests do
            not belong to one model and one checkpoint.
        """
        make = "Make it with: saccade export CHECKPOINT"
        if not self.path.is_dir():
            raise SaccadeError(f"{self}: no such folder. {make}")
        manifests = []
        for path in sorted(self.path.glob("*" + SUFFIX)):
            content = read_json(path)
            manifests.append(manifest_of(content, path))
            if content["version"] == SQUASHING:
                self._squashing.add(manifests[-1].variant.name)
        if not manifests:
            raise SaccadeError(f"{self}: no {SUFFIX} in it. {make}")
        known = {manifest.file.name for manifest in manifests}
        if strays := sorted({path.name for path in self.path.glob("*.onnx")} - known):
            raise SaccadeError(
                f"{self.path / strays[0]}: has no manifest. Remove it, or export again."
            )
        first = manifests[0]
        for manifest in manifests:
            if (manifest.variant.model, manifest.parent) != (first.variant.model, first.parent):
                raise SaccadeError(
                    f"{self}: {manifest.variant.name} and {first.variant.name} come from different "
                    "models or checkpoints. Export each into its own folder."
                )
        return tuple(sorted(manifests, key=_order))

    @cached_property
    def variants(self) -> tuple[VariantFiles, ...]:
        """In the order of the manifests.

        Raises: SaccadeError if a variant lacks a component that every request needs.
        """
        return grouped(self.manifests)

    @property
    def model(self) -> str:
        """The name of the model, which is that of the router."""
        return self.manifests[0].variant.model

    def file(self, manifest: Manifest) -> Path:
        """An artefact that is there and has the bytes that its manifest promises.

        Raises: SaccadeError otherwise, also if it changed since it was last asked for.
        """
        expected = manifest.file
        path = self.path / expected.name
        if not path.is_file():
            raise SaccadeError(f"{path}: missing, though its manifest is there. {AGAIN}")
        now, state = time.time_ns(), path.stat()
        stamp = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        if self._hashed.get(expected) == stamp:
            return path
        if (digest := sha256_of(path)) != expected.sha256:
            raise SaccadeError(
                f"{path}: SHA-256 is {digest[:12]}..., its manifest says {expected.sha256[:12]}... "
                f"The file was changed after its export. {AGAIN}"
            )
        if state.st_size != expected.bytes:
            raise SaccadeError(
                f"{path}: has {state.st_size} bytes, its manifest says {expected.bytes}. {AGAIN}"
            )
        if max(state.st_mtime_ns, state.st_ctime_ns) < now - _TICK_NS:
            self._hashed[expected] = stamp
        return path

    def check_files(self) -> None:
        """Raises: SaccadeError for the first artefact that `file` refuses."""
        for manifest in self.manifests:
            self.file(manifest)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Parent of the files by its name, read once; none where nothing lies there.

        Raises: SaccadeError if it is no checkpoint, MissingPackage if nothing here can read it.
        """
        path = self.path / self.manifests[0].parent.name
        return self._load(path) if path.exists() else None

    @property
    def parent(self) -> Checkpoint:
        """The checkpoint that the folder's files were made of.

        Raises: SaccadeError if it is missing, or another one.
        """
        entry, checkpoint = self.manifests[0].parent, self.checkpoint
        if checkpoint is None:
            raise SaccadeError(
                f"{self.path / entry.name}: missing, but the reference is computed from it. Copy "
                f"the checkpoint with SHA-256 {entry.sha256[:12]}... there, or export again."
            )
        if checkpoint.sha256 != entry.sha256:
            raise SaccadeError(
                f"{checkpoint.path}: SHA-256 is {checkpoint.sha256[:12]}..., the manifests name "
                f"{entry.sha256[:12]}... as their parent. Put that checkpoint back, or export this "
                "one."
            )
        return checkpoint

    @cached_property
    def frontier(self) -> Frontier | None:
        """Measurements of the folder; none where nothing was measured.

        Raises: SaccadeError if the file that is there is no frontier.
        """
        path = self.path / FILE_NAME
        return read_frontier(path) if path.exists() else None

    def merge(self, entries: Iterable[Entry]) -> Frontier:
        """Add measurements to the frontier of the folder, in one atomic write.

        A new one replaces an old one of the same bytes, runtime, device and way to run custom ops;
        those of bytes that are not of the folder are dropped.
        Raises: SaccadeError if the file that is there cannot be read or is another model's, or
            an artefact is no longer what it was.
        """
        path = self.path / FILE_NAME
        with only_writer(path, wait_s=30):  # else two that add at once would lose one's
            # As it is now: another command may have added to what was read before.
            old = read_frontier(path) if path.exists() else Frontier(self.model, ())
            if old.model != self.model:
                raise SaccadeError(
                    f"{path}: is the frontier of {old.model!r}, expected {self.model!r}. Remove it."
                )
            self.check_files()
            frontier = merged(old, entries, self.variants)
            write_atomically(path, json_bytes(frontier.to_dict()))
        vars(self)["frontier"] = frontier
        return frontier

    def only(
        self, variants: Iterable[VariantFiles], entries: Iterable[Entry] | None = None
    ) -> "ArtefactFolder":
        """The same folder as if it held these variants alone; not to be merged into.

        With `entries` as if that was measured of them, else what the folder says of them.
        """
        kept, other = tuple(variants), copy(self)
        out = {variant.name for variant in self.variants} - {variant.name for variant in kept}
        if entries is not None:
            frontier: Frontier | None = merged(Frontier(self.model, ()), entries, kept)
        elif frontier := self.frontier:
            left = (entry for entry in frontier.entries if entry.variant not in out)
            frontier = Frontier(frontier.model, tuple(left))
        manifests = tuple(
            component for variant in kept for component in variant.components.values()
        )
        vars(other).update(variants=kept, manifests=manifests, frontier=frontier)
        return other

    def images_text(self) -> tuple[str, ...]:
        """Description of what becomes of an image, a line for each way that the manifests give."""
        lines: dict[str, None] = {}
        for manifest in self.manifests:
            if manifest.preprocessing is None:
                continue
            text = f"images: {manifest.preprocessing.described()}"
            if manifest.variant.name in self._squashing:
                text += (
                    f". The manifest has version {SQUASHING}, which knew no other way than to "
                    "squash: convert or train and export again to keep the shape of images"
                )
            lines[text] = None
        return tuple(lines)


def _order(manifest: Manifest) -> tuple[float, str, str, int]:
    entry = manifest.variant
    return -entry.budget, entry.precision, entry.setting, known_roles().index(entry.role)
