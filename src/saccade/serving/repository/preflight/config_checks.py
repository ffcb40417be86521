# SPDX-License-Identifier: Apache-2.0
"""One model's configuration and files: those that `saccade repository` writes, and no other.

A list of what is forbidden ends with the server's next release: `EXECUTION_ENV_PATH`, an agent or
a warm-up of four billion rounds are each one line of a configuration. And a server reads more than
its configuration names: a library `libtriton_*.so`, a `model.py`, a stub of the Python backend, a
second version or `configs/` beside a model are found by their names.
"""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path

from saccade.errors import SaccadeError
from saccade.serving.repository.files import entries
from saccade.serving.repository.model_config import LABELS_FILE
from saccade.serving.repository.preflight.difference import differences
from saccade.serving.repository.preflight.rendered import FREE, rendered_config, rendered_files
from saccade.serving.repository.preflight.report import NotChecked
from saccade.serving.repository.preflight.repository import RepositoryModel
from saccade.serving.repository.preflight.target import Target


def check_config(model: RepositoryModel, target: Target) -> Iterator[str]:
    """The text can be parsed."""
    try:
        model.parsed_config()
    except SaccadeError as error:
        yield str(error)


def check_fields(model: RepositoryModel, target: Target) -> Iterator[str]:
    """The configuration is the one that is written for this model with some options."""
    yield from differences(model.fields, rendered_config(model), FREE)


def check_content(model: RepositoryModel, target: Target) -> Iterator[str]:
    """The folder holds what is written for this model."""
    yield from departing_files(model.folder, rendered_files(model))


def departing_files(folder: Path, written: Mapping[str, bytes | None]) -> Iterator[str]:
    """The files that a folder lacks, that nobody wrote there, or with other content."""
    present = {entry.name: entry.path for entry in entries(folder)}
    for name in sorted(set(written) - set(present)):
        yield f"{name} is missing. Write the repository again."
    for name in sorted(set(present) - set(written)):
        yield f"{name} is not a file that saccade writes there, and a server may run it. Remove it."
    for name in sorted(set(present) & set(written)):
        content = written[name]
        if content is not None and (found := present[name].read_bytes()) != content:
            yield (
                f"{name} is not what this release of saccade writes there: "
                f"{_departure(found, content)}. Write the repository again."
            )


def _departure(content: bytes, expected: bytes) -> str:
    texts = (each.decode("utf-8", "surrogateescape") for each in (content, expected))
    lines = zip_longest(*(text.splitlines(keepends=True) for text in texts), fillvalue="")
    pairs = enumerate(lines, start=1)
    number, (here, there) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"line {number} is {here!r:.60}, expected {there!r:.60}"


def check_versions(model: RepositoryModel, target: Target) -> Iterator[str]:
    """The version folder 1, and no other."""
    # The server takes the number in front of a folder's name: `1.old` is version 1 again.
    versions = sorted(
        path.name for path in model.folder.iterdir() if path.is_dir() and path.name[:1].isdigit()
    )
    if versions != ["1"]:
        yield f"its version folders are {', '.join(versions) or 'none'}, expected 1 alone."


def check_instances(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Instances on a device that the server and this machine have."""
    if all(group.kind != group.KIND_GPU for group in model.config.instance_group):
        return
    if target.bundled:
        yield "instance kind is KIND_GPU; the backend of the bundled server runs on KIND_CPU."
    elif not target.gpus:
        raise NotChecked("its instances run on a GPU, and there is none at hand")


def check_labels(model: RepositoryModel, target: Target) -> Iterator[str]:
    """A label for each class."""
    for tensor in model.config.output:
        count = len(model.manifest.labels)
        if tensor.label_filename and list(tensor.dims) != [-1] and count != tensor.dims[-1]:
            yield f"{LABELS_FILE} has {count} labels, {tensor.name} {tensor.dims[-1]} classes."
