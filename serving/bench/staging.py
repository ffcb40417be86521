# SPDX-License-Identifier: Apache-2.0
"""A repository to measure with, made elsewhere: the artefact folder changes only at the end."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from saccade.export.artefact.frontier import Entry, merge
from saccade.export.artefact.manifest import SUFFIX, Manifest
from saccade.export.runtimes.runtime import DEFAULT
from saccade.leftovers import temporary_folder
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions


@contextmanager
def staged_repository(
    folder: Path,
    manifests: Sequence[Manifest],
    entries: Sequence[Entry],
    *,
    runtime: str = DEFAULT,
    op_library: bool = True,
) -> Iterator[Path]:
    """A repository of the folder's variants with these entries as its frontier, for a while."""
    with temporary_folder("bench") as temporary:
        staging = temporary / "artefacts"
        staging.mkdir()
        names = [manifests[0].parent.name]
        for manifest in manifests:
            names += [manifest.file.name, manifest.variant.name + SUFFIX]
        for name in names:
            if (folder / name).exists():
                _link(folder / name, staging / name)
        merge(staging, manifests[0].variant.model, entries)
        repository = temporary / "repository"
        deploy(staging, RepositoryOptions(repository, runtime=runtime, op_library=op_library))
        yield repository


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
