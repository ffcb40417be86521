# SPDX-License-Identifier: Apache-2.0
"""`saccade.json`, the description of a repository: what it serves, and each file's hash."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.core.errors import Damaged, SaccadeError
from saccade.core.files import sha256_of
from saccade.core.schema import AGAIN as EXPORT_AGAIN
from saccade.core.schema import typed
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.models.preprocessing import Preprocessing
from saccade.plugins.execution import OPS, Ops
from saccade.serving.repository.files import regular_files
from saccade.serving.repository.runtimes.registry import served_names
from saccade.serving.repository.threads import ThreadRule, described, read_rules

SCHEMA = "saccade.repository"
VERSION = 2
DESCRIPTION = "saccade.json"
MAX_DESCRIPTION_BYTES = 16 << 20  # about 100 bytes per file: a larger file is not a description
WRITER = "saccade repository FOLDER --out REPOSITORY --force"


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
            what = f"has no {DESCRIPTION}" if Path(folder).is_dir() else "is not a folder"
            state = f"is not a model repository: it {what}."
        raise SaccadeError(
            f"{folder}: {state} Write one with: saccade repository FOLDER --out REPOSITORY"
        )
    try:
        if (size := path.stat().st_size) > MAX_DESCRIPTION_BYTES:
            raise ValueError(f"has {size} bytes, expected at most {MAX_DESCRIPTION_BYTES}")
        data = path.read_bytes()
        content = json.loads(data)
        version = content["schema"], content["version"]
        if version != (SCHEMA, VERSION):
            raise ValueError(f"is {version}, expected {(SCHEMA, VERSION)}")
        files = typed(dict[str, str], content["files"], "files: ")
        model = typed(str, content["model"], "model: ")
        variants, unmeasured, kept = (
            typed(tuple[str, ...], content[key], f"{key}: ")
            for key in ("variants", "unmeasured", "samples")
        )
        if (runtime := content["runtime"]) not in (known := served_names()):
            raise ValueError(f"runtime is {runtime!r}, expected {' or '.join(known)}")
        policies = typed(tuple[str, ...], content.get("policies", []), "policies: ")
        slo_ms = typed(float | None, content.get("slo_ms"), "slo_ms: ")
        cores = typed(int, content["cores"], "cores: ")
        threads = read_rules(content["threads"])
        if (ops := content.get("ops")) not in (None, *OPS):
            raise ValueError(f"ops is {ops!r}, expected {' or '.join(OPS)}")
    except (
        OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SaccadeError
    ) as error:  # fmt: skip
        why = f"does not describe a model repository ({_said(error)})"
        raise Damaged(path, why, WRITER) from error
    own = hashlib.sha256(data).hexdigest()
    written = Deployment(
        Path(folder), model, variants, unmeasured, runtime, kept, ops, policies, slo_ms, cores,
        threads, own,
    )  # fmt: skip
    return written, files


def _said(error: Exception) -> str:
    # A KeyError contains only the key.
    said = f"no {error}" if isinstance(error, KeyError) else str(error)
    return said.replace(f". {EXPORT_AGAIN}", "")


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
