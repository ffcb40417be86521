# SPDX-License-Identifier: Apache-2.0
"""Join the models of several repositories, so that a single server start is enough."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from saccade.core.files import json_bytes, sha256_of
from saccade.serving.repository.description import VERSION


def join(folder: Path, repositories: Iterable[Path]) -> Path:
    """Copy the models of the repositories into `folder`, described as one model's."""
    models = []
    for repository in repositories:
        for model in sorted(path for path in repository.iterdir() if path.is_dir()):
            shutil.copytree(model, folder / model.name)
            models.append(model.name)
    files = [path for path in folder.rglob("*") if path.is_file()]
    content = {
        "schema": "saccade.repository", "version": VERSION, "model": models[0],
        "variants": models[1:], "unmeasured": [], "runtime": "onnxruntime", "samples": [],
        "cores": 1, "threads": {},
        "files": {path.relative_to(folder).as_posix(): sha256_of(path) for path in files},
    }  # fmt: skip
    (folder / "saccade.json").write_bytes(json_bytes(content))
    return folder
