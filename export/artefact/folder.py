# SPDX-License-Identifier: Apache-2.0
"""The folder that `saccade export` writes, read, checked and hashed once."""

import shlex
import time
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import NoReturn

from saccade.core.checks import did_you_mean
from saccade.core.errors import SaccadeError
from saccade.core.files import check_digest, json_bytes, sha256_of, write_atomically
from saccade.core.leftovers import only_writer
from saccade.core.schema import AGAIN, GROUP_AGAIN
from saccade.exporter.artefact.frontier import (
    FILE_NAME,
    Frontier,
    FrontierEntry,
    PolicyEntry,
    merged,
    read_frontier,
)
from saccade.exporter.artefact.manifest import (
    DATA_SUFFIX,
    SUFFIX,
    DataEntry,
    FileEntry,
    Manifest,
    VariantFiles,
    grouped,
    read_manifest,
)
from saccade.exporter.artefact.precedence import NarrowerMeasurement, narrower
from saccade.exporter.artefact.variant import known_roles
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.checkpoint_folder import checkpoint_name, is_checkpoint_folder
from saccade.models.shipped import SHIPPED

# Two changes within one tick of a file system's clock have the same times; a tick is at most 10 ms.
_NO_FOLDER = "no such folder"
_TICK_NS = 50_000_000


class ArtefactFolder:
    """The manifests, files, measurements and checkpoint of one model's variants.

    Everything that was read is cached. A file is hashed on first access, and again only if it may
    have changed since, so an opened file has the bytes that its manifest promises.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._hashed: dict[FileEntry | DataEntry, tuple[int, ...]] = {}
        self._load = cache(load)

    @classmethod
    def open(cls, folder: "ArtefactFolder | Path | str") -> "ArtefactFolder":
        """Return `folder`, or make one from its path. Nothing is read yet."""
        return folder if isinstance(folder, ArtefactFolder) else cls(folder)

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def manifests(self) -> tuple[Manifest, ...]:
        """All manifests, largest budget first; the ONNX files are not opened.

        The components of a variant are adjacent; the one that answers a plain request is first.

        Raises: SaccadeError if there is none, an artefact has no manifest, or the manifests do
            not belong to one model and one checkpoint.
        """
        make = "Create it with: saccade export CHECKPOINT --out FOLDER"
        checkpoint = str(self.path).startswith(SHIPPED) or self.path.suffix == ".safetensors"
        if (checkpoint and not self.path.is_dir()) or is_checkpoint_folder(self.path):
            stem = checkpoint_name(Path(str(self.path).removeprefix(SHIPPED)))
            raise SaccadeError(
                f"{self}: found a checkpoint, expected an artefact folder. Export it first: "
                f"saccade export {shlex.quote(str(self.path))} --out build/{shlex.quote(stem)}"
            )
        if not self.path.is_dir():
            what = "is a file, expected an artefact folder" if self.path.exists() else _NO_FOLDER
            beside = {path.parent.name for path in self.path.parent.glob(f"*/*{SUFFIX}")}
            close = did_you_mean(self.path.name, beside)
            raise SaccadeError(f"{self}: {_described(self.path) or f'{what}.{close} {make}'}")
        manifests = []
        for path in sorted(self.path.glob("*" + SUFFIX)):
            manifests.append(read_manifest(path))
        if not manifests:
            raise SaccadeError(f"{self}: {_described(self.path) or f'no {SUFFIX} in it. {make}'}")
        known = {file.name for manifest in manifests for file in manifest.file.files}
        patterns = "*.onnx", f"*.onnx{DATA_SUFFIX}"
        present = {path.name for pattern in patterns for path in self.path.glob(pattern)}
        if strays := sorted(present - known):
            raise SaccadeError(
                f"{self.path / strays[0]}: has no manifest. Remove it, or export again."
            )
        first = manifests[0]
        for manifest in manifests:
            parent = manifest.parent if manifest.member is None else first.parent
            if (manifest.variant.model, parent) != (first.variant.model, first.parent):
                raise SaccadeError(
                    f"{self}: {manifest.variant.name} and {first.variant.name} come from different "
                    "models or checkpoints. Export each into its own folder."
                )
        return tuple(sorted(manifests, key=_order))

    @cached_property
    def variants(self) -> tuple[VariantFiles, ...]:
        """The variants, in the order of the manifests.

        Raises: SaccadeError if a variant lacks a component that every request needs.
        """
        return grouped(self.manifests)

    @property
    def model(self) -> str:
        """The name of the model, which is also the name of its router."""
        return self.manifests[0].variant.model

    def file(self, manifest: Manifest) -> Path:
        """Return the path of a manifest's ONNX file after checking the hashes of all its files.

        Raises: SaccadeError if a file is missing, does not match its manifest, or has changed
            since the last call, or if weights are in a link.
        """
        if manifest.file.data and (self.path / manifest.file.data.name).is_symlink():
            raise SaccadeError(
                f"{self.path / manifest.file.data.name}: is a link, expected the file itself, "
                "because runtimes do not open weights elsewhere. Copy it here."
            )
        again = AGAIN if manifest.member is None else GROUP_AGAIN
        for expected in manifest.file.files:
            path = self.path / expected.name
            if not path.is_file():
                raise SaccadeError(f"{path}: missing, but its manifest exists. {again}")
            now, state = time.time_ns(), path.stat()
            times = state.st_mtime_ns, state.st_ctime_ns
            stamp = (state.st_dev, state.st_ino, state.st_size, *times)
            if self._hashed.get(expected) == stamp:
                continue
            changed = f"The file was changed after its export. {again}"
            check_digest(path, sha256_of(path), expected.sha256, "in its manifest", changed)
            if state.st_size != expected.bytes:
                raise SaccadeError(
                    f"{path}: has {state.st_size} bytes, expected {expected.bytes} as in its "
                    f"manifest. {again}"
                )
            if max(times) < now - _TICK_NS:
                self._hashed[expected] = stamp
        return self.path / manifest.file.name

    def check(self) -> None:
        """Read the manifests, variants and measurements; no other file is opened.

        Raises: SaccadeError for the first thing that is wrong.
        """
        _ = self.variants, self.frontier

    def check_files(self) -> None:
        """Check every file.

        Raises: SaccadeError for the first one that `file` refuses.
        """
        for manifest in self.manifests:
            self.file(manifest)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint in the folder, in a group that of the first variant.

        It is read once and not compared with the manifests' hash. None if the file does not exist.
        Raises: SaccadeError if it is not a checkpoint, MissingPackage if no installed package can
            read it.
        """
        return self.checkpoint_of(self.manifests[0])

    def checkpoint_of(self, manifest: Manifest) -> Checkpoint | None:
        """The checkpoint that a manifest names; see `checkpoint`."""
        path = self.path / manifest.parent.name
        return self._load(path) if path.exists() else None

    @property
    def parent(self) -> Checkpoint:
        """The same after comparing its hash.

        Raises: SaccadeError as `parent_of` does.
        """
        return self.parent_of(self.manifests[0])

    def parent_of(self, manifest: Manifest) -> Checkpoint:
        """Return the checkpoint that a manifest's file was exported from.

        Raises: SaccadeError if it is missing or is a different one.
        """
        entry, checkpoint = manifest.parent, self.checkpoint_of(manifest)
        if checkpoint is None:
            raise SaccadeError(
                f"{self.path / entry.name}: missing, but the reference is computed from it. Copy "
                f"the checkpoint with SHA-256 {entry.sha256[:12]}... there, or export again."
            )
        put_back = "Put that checkpoint back, or export this one."
        own = checkpoint.sha256
        check_digest(checkpoint.path, own, entry.sha256, "in the manifests", put_back)
        return checkpoint

    @cached_property
    def frontier(self) -> Frontier | None:
        """The measurements of the folder, or None if nothing was measured.

        Raises: SaccadeError if the file is not a frontier.
        """
        path = self.path / FILE_NAME
        return read_frontier(path) if path.exists() else None

    def merge(
        self,
        entries: Iterable[FrontierEntry],
        *,
        policies: Iterable[PolicyEntry] | None = None,
        over_larger: bool = True,
    ) -> Frontier:
        """Add measurements to the frontier of the folder, in one atomic write.

        A new measurement replaces an old one of the same file, runtime, device and implementation
        of custom ops. Measurements of files that are no longer in the folder are dropped. Either
        all new ones are added or none. `policies` replace those measured in the same place; None
        keeps them.
        Raises: NarrowerMeasurement, without `over_larger`, if a new one measured less than the one
            that it would replace. SaccadeError if the existing file cannot be read or belongs to
            another model, or if an artefact has changed.
        """
        entries, path = tuple(entries), self.path / FILE_NAME
        with only_writer(path, wait_s=30):  # concurrent writers would lose measurements
            # Read it again: another command may have added to it since.
            old = read_frontier(path) if path.exists() else Frontier(self.model, ())
            if old.model != self.model:
                raise SaccadeError(
                    f"{path}: is the frontier of {old.model!r}, expected {self.model!r}. Remove it."
                )
            self.check_files()
            if not over_larger and (less := narrower(old, entries)):
                raise NarrowerMeasurement(path, less)
            frontier = merged(old, entries, self.variants, policies)
            write_atomically(path, json_bytes(frontier.to_dict()))
        vars(self)["frontier"] = frontier
        return frontier

    def only(
        self, variants: Iterable[VariantFiles], entries: Iterable[FrontierEntry] | None = None
    ) -> "FolderView":
        """Return a view of the folder with only these variants.

        Its measurements are `entries` if given, otherwise those that the folder has.
        """
        kept, view = tuple(variants), FolderView(self.path)
        out = {variant.name for variant in self.variants} - {variant.name for variant in kept}
        if entries is not None:
            frontier: Frontier | None = merged(Frontier(self.model, ()), entries, kept)
        elif frontier := self.frontier:
            left = (entry for entry in frontier.entries if entry.variant not in out)
            there = {variant.sha256 for variant in kept}
            policies = (policy for policy in frontier.policies if policy.hashes <= there)
            frontier = Frontier(frontier.model, tuple(left), tuple(policies))
        manifests = tuple(
            component for variant in kept for component in variant.components.values()
        )
        own = {"variants": kept, "manifests": manifests, "frontier": frontier}
        vars(view).update({**vars(self), **own})
        return view

    def images_text(self) -> tuple[str, ...]:
        """Describe the preprocessing of images: one line for each kind in the manifests."""
        kinds = (manifest.preprocessing for manifest in self.manifests)
        return tuple(dict.fromkeys(f"images: {kind.described()}" for kind in kinds if kind))


class FolderView(ArtefactFolder):
    """Some variants of a folder, to read: measurements are added to the whole folder."""

    def merge(self, *_: object, **__: object) -> NoReturn:
        """Refuse to write.

        Raises: TypeError.
        """
        raise TypeError(f"{self.path}: merge measurements into the folder, not into a view of it")


def _described(path: Path) -> str:
    """Say what a folder without manifests is instead and what to do; empty if unknown."""
    if (path / "saccade.json").is_file():
        return (
            "is a model repository, expected the artefact folder that it was made from. "
            f"Check a repository with `saccade preflight {path}` and serve it with "
            f"`saccade serve {path}`"
        )
    if (path / "sweep.json").is_file():
        return f"is a sweep, expected an artefact folder. Pass {path / 'artefacts'}"
    if (path / "report.json").is_file():
        return "is a report, expected the artefact folder that was measured"
    from saccade.models.official.hub_folder import foreign_text

    return foreign_text(path, "an artefact folder")


def _order(manifest: Manifest) -> tuple[float, str, str, int]:
    entry = manifest.variant
    return -entry.budget, entry.precision, entry.setting, known_roles().index(entry.role)
