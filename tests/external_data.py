# SPDX-License-Identifier: Apache-2.0
"""Models of a few KiB whose weights are in a data file, as if they were beyond 2 GiB."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import onnx

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import FileEntry, write_manifest

LARGE_BYTES = 128  # of a weight that leaves the graph


@contextmanager
def small_limits(one_file_bytes: int = 0) -> Iterator[None]:
    """Within, weights of a few bytes are large, and a file of a few bytes is too large."""
    from saccade.exporter.graph import half_graph, model_file

    with (
        mock.patch.object(half_graph, "LARGE_BYTES", LARGE_BYTES),
        mock.patch.object(model_file, "LARGE_BYTES", LARGE_BYTES),
        mock.patch.object(model_file, "ONE_FILE_BYTES", one_file_bytes),
    ):
        yield


def written(proto: onnx.ModelProto, path: Path) -> FileEntry:
    """Write a model with a data file beside it."""
    from saccade.exporter.graph.model_file import write_model

    with small_limits():
        return write_model(proto, {}, path)


def with_data_files(folder: Path) -> Path:
    """Move the weights of every file of an artefact folder to a data file."""
    for manifest in ArtefactFolder(folder).manifests:
        path = folder / manifest.file.name
        proto = onnx.load(path)
        path.unlink()
        write_manifest(folder, replace(manifest, file=written(proto, path)))
    return folder
