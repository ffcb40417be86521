# SPDX-License-Identifier: Apache-2.0
"""Served runtimes: their protocol, and the files of one component."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.plugins.execution import Ops
from saccade.serving.repository.model_config import MAX_BATCH
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.repository import RepositoryModel
from saccade.serving.repository.preflight.target import Target

DEFAULT_RUN_BATCH = 8

ModelCheck = Callable[[RepositoryModel, Target], Iterator[str]]


@dataclass(frozen=True)
class StoredFile:
    """File of a model's folder: a copy of a file, or these bytes."""

    source: Path | bytes
    sha256: str | None = None  # that the copy must have


@dataclass(frozen=True)
class ServedFiles:
    """One component as the server finds it: files by their names in its folder, and their fields.

    Units: run_batch, to `fields`, is the number of samples that run fastest in one call.
    """

    files: Mapping[str, StoredFile]
    # Of the server's ModelConfig message, as plain data.
    fields: Callable[[int], Mapping[str, Any]]
    ops: Ops = None  # how its custom ops run; none: it has none
    max_batch: int = MAX_BATCH
    usual_batch: int = DEFAULT_RUN_BATCH


class ServedRuntime(Protocol):
    """The server's side of a runtime."""

    backend: str  # the server's backend, as a configuration names it
    platform: str  # what a configuration names beside it; often nothing
    bundled: bool  # whether the server of the pip package runs it
    models_title: str  # what its models are called in a message
    server_arguments: tuple[str, ...]  # what the server has to be told besides
    # of preflight, by name; they come after those that every model has
    checks: Mapping[str, ModelCheck]
    rules: tuple[str, ...]  # of these, those that load nothing

    def check_options(self, options: RepositoryOptions) -> None:
        """Raises: SaccadeError for options that it does not have, or lacks."""

    def check_manifest(self, manifest: Manifest) -> None:
        """Raises: SaccadeError for a file whose format the servers do not read."""

    def component_files(
        self, folder: ArtefactFolder, options: RepositoryOptions, max_images: int
    ) -> Mapping[str, ServedFiles]:
        """Files that are served of each component, by its name.

        Raises: SaccadeError for what is missing, does not fit, or takes fewer than `max_images`.
        """

    def config_fields(
        self, model: RepositoryModel, options: RepositoryOptions, run_batch: int
    ) -> Mapping[str, Any]:
        """The fields that it writes of the model that is there, as `ServedFiles` has them."""

    def files(self, model: RepositoryModel) -> Iterable[str]:
        """The files that it writes into the folder of the model that is there."""

    def weights_bytes(self, model: RepositoryModel) -> int:
        """Bytes that a server reads of a model's folder."""
