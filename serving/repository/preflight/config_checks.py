# SPDX-License-Identifier: Apache-2.0
"""Check that a model's configuration and files are those that `saccade repository` writes.

Only what saccade writes is allowed. A list of forbidden fields would be out of date with the
server's next release: `EXECUTION_ENV_PATH`, an agent or a warm-up of four billion rounds take one
line of a configuration each. A server also reads files that the configuration does not mention: it
finds a library `libtriton_*.so`, a `model.py`, a stub of the Python backend, a second version or
`configs/` next to a model by name.
"""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.serving.repository.description import entries
from saccade.serving.repository.model_config import LABELS_FILE
from saccade.serving.repository.preflight.rendered import (
    differences,
    free_fields,
    rendered_config,
    rendered_files,
)
from saccade.serving.repository.preflight.report import NotChecked, Target
from saccade.serving.repository.preflight.repository import RepositoryModel


def check_config(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the configuration can be parsed."""
    try:
        model.parsed_config()
    except SaccadeError as error:
        yield str(error)


def check_fields(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that saccade would write this configuration for the model with some options."""
    yield from differences(model.fields, rendered_config(model), free_fields(model.served))


def check_content(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the folder contains exactly the files that saccade writes for this model."""
    yield from departing_files(model.folder, rendered_files(model))


def departing_files(folder: Path, written: Mapping[str, bytes | None]) -> Iterator[str]:
    """Report files that are missing from a folder, do not belong there, or were changed."""
    present = {entry.name: entry.path for entry in entries(folder)}
    for name in sorted(set(written) - set(present)):
        yield f"{name} is missing. Write the repository again."
    for name in sorted(set(present) - set(written)):
        yield f"{name} is not a file that saccade writes. A server may run it: remove it."
    for name in sorted(set(present) & set(written)):
        content = written[name]
        if content is not None and (found := present[name].read_bytes()) != content:
            yield (
                f"{name} is not what this release of saccade writes: "
                f"{_departure(found, content)}. Write the repository again."
            )


def _departure(content: bytes, expected: bytes) -> str:
    texts = (each.decode("utf-8", "surrogateescape") for each in (content, expected))
    lines = zip_longest(*(text.splitlines(keepends=True) for text in texts), fillvalue="")
    pairs = enumerate(lines, start=1)
    number, (here, there) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"line {number} is {here!r:.60}, expected {there!r:.60}"


def check_versions(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that `1` is the only version folder."""
    # The server reads the number at the start of a folder's name: `1.old` is also version 1.
    versions = sorted(
        path.name for path in model.folder.iterdir() if path.is_dir() and path.name[:1].isdigit()
    )
    if versions != ["1"]:
        yield f"its version folders are {', '.join(versions) or 'none'}, expected 1 only."


def check_instances(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that instances are on a device that the server and this machine have."""
    if all(group.kind != group.KIND_GPU for group in model.config.instance_group):
        return
    if target.bundled:
        yield (
            "instance kind is KIND_GPU, but the backend of the bundled server runs on KIND_CPU. "
            "Write the repository with --instances cpu, or use a container of the server."
        )
    elif not target.gpus:
        raise NotChecked("its instances run on a GPU, and this machine has none")


def check_labels(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that there is one label per class."""
    for tensor in model.config.output:
        count = len(model.manifest.labels)
        if tensor.label_filename and list(tensor.dims) != [-1] and count != tensor.dims[-1]:
            classes = tensor.dims[-1]
            yield f"{LABELS_FILE} has {count} labels, but {tensor.name} has {classes} classes."
