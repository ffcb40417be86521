# SPDX-License-Identifier: Apache-2.0
"""`saccade.json`, the description of a repository: what it serves, and each file's hash."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_type_hints

from saccade.core.errors import Damaged, SaccadeError
from saccade.core.files import read_regular, sha256_of
from saccade.core.schema import AGAIN as EXPORT_AGAIN
from saccade.core.schema import typed
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.models.preprocessing import Preprocessing
from saccade.plugins.contract import Ops
from saccade.serving.repository.runtimes.registry import served_names
from saccade.serving.repository.threads import ThreadRule, described, read_rules

SCHEMA = "saccade.repository"
VERSION = 2
DESCRIPTION = "saccade.json"
MAX_DESCRIPTION_BYTES = 16 << 20  # about 100 bytes per file: a larger file is not a description
WRITER = "saccade repository FOLDER --out REPOSITORY --force"
_READ_APART = {"folder", "runtime", "threads", "sha256"}
# Keys that every description has.
_KEYS = (
    *("schema", "version", "model", "variants", "unmeasured", "runtime", "samples", "cores"),
    *("threads", "files"),
)


@dataclass(frozen=True)
class Deployment:
    """A model repository: its folder and what it serves."""

    folder: Path
    model: str
    # Models that the router calls: one per component of each variant.
    variants: tuple[str, ...]
    unmeasured: tuple[str, ...]  # variants that min_score and max_latency_ms can never choose
    runtime: str = DEFAULT
    samples: tuple[str, ...] = ()  # models that have a stored sample with its answer
    ops: Ops = None  # how custom ops run; None: there are none, or an older release wrote it
    policies: tuple[str, ...] = ()  # names of the policies that requests may follow
    slo_ms: float | None = None  # objective of the load-adaptive choice; None: there is none
    cores: int = 1  # of the server that the threads of each model were chosen for
    threads: dict[str, ThreadRule] = field(default_factory=dict)
    # SHA-256 of the description, which has the hash of every file; empty until it was read
    sha256: str = field(default="", compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "folder": str(self.folder),
            "model": self.model,
            "variants": list(self.variants),
            "unmeasured": list(self.unmeasured),
            "runtime": self.runtime,
            "samples": list(self.samples),
            "ops": self.ops,
            **({"policies": list(self.policies)} if self.policies else {}),
            **({} if self.slo_ms is None else {"slo_ms": self.slo_ms}),
            "cores": self.cores,
            "threads": described(self.threads, self.cores),
        }


def read_repository(folder: Path) -> Deployment:
    """Read a repository that `deploy` wrote, and check that no file of it has changed.

    Raises: SaccadeError if the folder is not a repository of this version, has a link, or has a
        file that is missing, changed or foreign.
    """
    deployment, files = read_description(folder)
    present = regular_files(Path(folder))
    if odd := sorted(set(files) ^ (set(present) - {DESCRIPTION})):
        state = "is missing" if odd[0] in files else "was not written by saccade"
        raise Damaged(folder, f"{odd[0]} {state}", WRITER)
    for name, digest in files.items():
        if sha256_of(present[name]) != digest:
            raise Damaged(folder, f"{name} was changed after it was written", WRITER)
    return deployment


def read_description(folder: Path) -> tuple[Deployment, dict[str, str]]:
    """Read the description of a repository and the hash of each file, without opening the files.

    Raises: SaccadeError if the folder is not a repository of this version.
    """
    path = Path(folder) / DESCRIPTION
    if not path.is_file():
        state = "no such folder."
        if Path(folder).exists():
            from saccade.models.official.hub_folder import foreign_text

            if found := foreign_text(Path(folder), "a model repository"):
                raise SaccadeError(f"{folder}: {found}")
            what = f"has no {DESCRIPTION}" if Path(folder).is_dir() else "is not a folder"
            state = f"is not a model repository: it {what}."
        raise SaccadeError(
            f"{folder}: {state} Write one with: saccade repository FOLDER --out REPOSITORY"
        )
    try:
        data = read_regular(path, MAX_DESCRIPTION_BYTES)
        content = json.loads(data)
        if missing := [key for key in _KEYS if key not in content]:
            raise ValueError(f"no {missing[0]!r}")
        version = content["schema"], content["version"]
        if version != (SCHEMA, VERSION):
            raise ValueError(f"is {version}, expected {(SCHEMA, VERSION)}")
        if (runtime := content["runtime"]) not in (known := served_names()):
            raise ValueError(f"runtime is {runtime!r}, expected {' or '.join(known)}")
        files = typed(dict[str, str], content["files"], "files: ")
        kinds = get_type_hints(Deployment)
        given = {
            key: typed(kinds[key], content[key], f"{key}: ")
            for key in sorted(content.keys() & kinds.keys() - _READ_APART)
        }
        threads = read_rules(content["threads"])
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, SaccadeError) as error:
        said = str(error).replace(f". {EXPORT_AGAIN}", "")
        raise Damaged(path, f"does not describe a model repository ({said})", WRITER) from error
    own = hashlib.sha256(data).hexdigest()
    deployment = Deployment(Path(folder), runtime=runtime, threads=threads, sha256=own, **given)
    return deployment, files


def description(
    folder: Path, deployment: Deployment, preprocessing: Preprocessing | None
) -> dict[str, Any]:
    """Return the description of a completely written repository, as plain values for JSON."""
    content = deployment.to_dict()
    del content["folder"]
    return {
        "schema": SCHEMA,
        "version": VERSION,
        **content,
        "preprocessing": preprocessing.to_dict() if preprocessing else None,
        "files": {name: sha256_of(path) for name, path in sorted(regular_files(folder).items())},
    }


class RepositoryEntry(NamedTuple):
    """An entry of a repository that is not a folder."""

    name: str  # as in the description, with slashes
    path: Path
    kind: Literal["file", "link", "other"]


def entries(folder: Path) -> Iterator[RepositoryEntry]:
    """Yield the entries of a folder and its subfolders in a fixed order, without following links.

    Raises: OSError if a folder cannot be read.
    """
    # An explicit stack: folders may be nested deeper than Python can recurse.
    waiting = [Path(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as listing:
            for item in sorted(listing, key=lambda entry: entry.name):
                path = Path(item.path)
                name = path.relative_to(folder).as_posix()
                if item.is_symlink():
                    yield RepositoryEntry(name, path, "link")
                elif item.is_dir(follow_symlinks=False):
                    waiting.append(path)
                else:
                    plain = item.is_file(follow_symlinks=False)
                    yield RepositoryEntry(name, path, "file" if plain else "other")


def regular_files(folder: Path) -> dict[str, Path]:
    """Return every file of a repository, by its name in the description.

    Raises: SaccadeError for a link, a special file, or a folder that cannot be read.
    """
    files = {}
    try:
        for entry in entries(folder):
            if entry.kind != "file":
                raise SaccadeError(f"{entry.path}: {fault_of(entry)}")
            files[entry.name] = entry.path
    except OSError as error:
        raise SaccadeError(f"{error.filename}: cannot be read ({error.strerror}).") from error
    return files


def fault_of(entry: RepositoryEntry) -> str:
    """Return why an entry that is not a regular file is refused, and what to do about it."""
    if entry.kind != "link":
        return "is neither a file nor a folder. Remove it."
    target = os.fspath(entry.path.readlink())
    return (
        f"is a link to {target:.200}, whose content the repository's hashes do not cover. "
        "Replace the link with the file or folder itself (cp -RL)."
    )
