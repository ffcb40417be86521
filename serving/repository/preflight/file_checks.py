# SPDX-License-Identifier: Apache-2.0
"""Check that all files are present, inside the repository, readable and unchanged."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from saccade.core.files import sha256_of
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.serving.repository.description import DESCRIPTION
from saccade.serving.repository.files import entries, fault_of
from saccade.serving.repository.model_config import LABELS_FILE
from saccade.serving.repository.preflight.repository import Repository
from saccade.serving.repository.preflight.target import Target

MOST_MODELS = 512
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


def check_files(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the files are those of the description, unchanged, and that none is a link."""
    present = {entry.name: entry for entry in entries(repository.folder)}
    for name, entry in present.items():
        if entry.kind != "file":
            yield f"{name} {fault_of(entry)}"
    for name in sorted(set(present) - set(repository.files) - {DESCRIPTION}):
        if present[name].kind == "file":
            yield f"{name} was not written by saccade. Remove it."
    for name, digest in sorted(repository.files.items()):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            yield f"{name} leads out of the repository."
        elif name not in present:
            yield f"{name} is missing or is not a file."
        elif present[name].kind == "file":
            yield from _content(present[name].path, name, digest)


def _content(path: Path, name: str, digest: str) -> Iterator[str]:
    if not path.stat().st_size and path.name != LABELS_FILE:
        yield f"{name} is empty."
        return
    try:
        actual = sha256_of(path)
    except OSError as error:
        yield f"{name} cannot be read ({error.strerror})."
        return
    if actual != digest:
        yield (
            f"{name} has the SHA-256 {actual[:12]}..., expected {digest[:12]}...: it was changed "
            "after it was written. Write the repository again."
        )


def check_models(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the model folders are those of the description: a server loads every folder."""
    said = [repository.deployment.model, *repository.deployment.variants]
    if len(said) > MOST_MODELS:
        yield (
            f"the description names {len(said)} models, expected at most {MOST_MODELS}: each runs "
            "in its own process."
        )
    folders = sorted(path.name for path in repository.folder.iterdir() if path.is_dir())
    for name in said:
        if not _NAME.fullmatch(name):
            yield (
                f"{name!r} is not a model name, expected lower-case letters, digits and hyphens."
            )
    for name, count in Counter(said).items():
        if count > 1:
            yield f"the description names {name} {count} times, expected once."
    for name in sorted(set(said) - set(folders)):
        yield f"{name} has no folder."
    for name in sorted(set(folders) - set(said)):
        # A server loads every folder; on some file systems the twin is even the same folder.
        twin = next((folder for folder in said if folder.lower() == name.lower()), None)
        differs = f", which differs from {twin} in case only" if twin else ""
        yield f"folder {name} is not a model of this repository{differs}. Remove it."


def check_top(repository: Repository, target: Target) -> Iterator[str]:
    """Check that the top folder has only the description and the measurements besides models."""
    for path in sorted(repository.folder.iterdir()):
        if not path.is_dir() and path.name not in (DESCRIPTION, FRONTIER):
            yield f"{path.name} is not a file that saccade writes. Remove it."
