# SPDX-License-Identifier: Apache-2.0
"""The protocol of served runtimes, and the files of one component."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from saccade.core.errors import SaccadeError
from saccade.core.options import flag
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.gpu import Gpu
from saccade.exporter.runtimes.runners import Runner
from saccade.plugins.contract import Ops
from saccade.serving.repository.model_config import MAX_BATCH, MODEL_FILE
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.repository import RepositoryModel, Target

DEFAULT_RUN_BATCH = 8
ONNXRUNTIMES_OWN = ("inter_op_threads", "parallel_nodes", "graph_level")  # options

ModelCheck = Callable[[RepositoryModel, Target], Iterator[str]]


@dataclass(frozen=True)
class StoredFile:
    """A file to store in a model's folder: a copy of another file, or given bytes."""

    source: Path | bytes
    sha256: str | None = None  # expected hash of the copy


@dataclass(frozen=True)
class ServedFiles:
    """One component for the server: its files by name, and fields of its configuration.

    Units: `fields` takes run_batch, the number of samples per call that runs fastest, and the
        threads of one run.
    """

    files: Mapping[str, StoredFile]
    # Fields of the server's ModelConfig message, as plain data.
    fields: Callable[[int, int], Mapping[str, Any]]
    ops: Ops = None  # how its custom ops run; None: it has none
    max_batch: int = MAX_BATCH
    usual_batch: int = DEFAULT_RUN_BATCH


def exported_files(manifest: Manifest, open_at: Callable[[str], Path]) -> dict[str, StoredFile]:
    """Return an exported file, with its data file if it has one, by their names in a repository.

    Their bytes are compared with the manifest's hashes when they are opened or copied. `open_at`
    returns the place of a file of the artefact folder.
    """
    file = manifest.file
    names = {f"1/{MODEL_FILE}": file} | {f"1/{data.name}": data for data in file.files[1:]}
    return {name: StoredFile(open_at(each.name), each.sha256) for name, each in names.items()}


def refuse_options(options: RepositoryOptions, runtime: str, *names: str) -> None:
    """Refuse options that only another runtime has.

    Raises: SaccadeError for the first one whose value is not the default.
    """
    usual = {field.name: field.default for field in fields(options)}
    for name in names:
        if getattr(options, name) != usual[name]:
            raise SaccadeError(
                f"{flag(name)} is for the runtime {runtime} only, and the runtime is "
                f"{options.runtime}. Leave it out, or pass --runtime {runtime}."
            )


class ServedRuntime(Protocol):
    """The server's side of a runtime; the defaults are those of one that runs exported files."""

    backend: str  # the server's backend, as named in a configuration
    platform: str = ""  # the platform in a configuration; often empty
    bundled: bool  # whether the server of the pip package runs it
    only_bundled: str = ""  # why no other server runs its models, as a sentence; empty if others do
    models_title: str  # name of its models in messages
    server_arguments: tuple[str, ...] = ()  # additional arguments of the server
    # checks of preflight by name; they come after the checks that every model has
    checks: Mapping[str, ModelCheck]
    rules: tuple[str, ...] = ()  # the names of those checks that load nothing
    # options of `saccade repository` that are its own: by name, the field that each sets
    option_fields: Mapping[str, str] = MappingProxyType({})

    def check_options(self, options: RepositoryOptions) -> None:
        """Check that the options suit the runtime.

        Raises: SaccadeError for an option that it does not have, or that is missing.
        """

    def check_manifest(self, manifest: Manifest) -> None:
        """Check that servers read the file's format; by default, they read all that is exported.

        Raises: SaccadeError if they do not.
        """
        return

    def component_files(
        self, folder: ArtefactFolder, options: RepositoryOptions, max_images: int
    ) -> Mapping[str, ServedFiles]:
        """Return the served files of each component, by the component's name.

        Raises: SaccadeError if a file is missing, does not match, or takes fewer than `max_images`.
        """

    def config_fields(
        self, model: RepositoryModel, options: RepositoryOptions, run_batch: int
    ) -> Mapping[str, Any]:
        """Return the configuration fields that it writes for an existing model."""

    def files(self, model: RepositoryModel) -> set[str]:
        """Return the names of the files that it writes for an existing model."""
        return {f"1/{name}" for name in model.files}

    def weights_bytes(self, model: RepositoryModel) -> int:
        """Return the number of bytes of weights that a server loads for a model."""
        paths = [model.version / name for name in model.files]
        return sum(path.stat().st_size for path in paths if path.is_file())

    def check_gpus(self, model: RepositoryModel, gpus: Sequence[Gpu]) -> None:
        """Check that this process can run the model on each of these GPUs.

        Raises: SaccadeError if it cannot.
        """

    def runner(self, model: RepositoryModel) -> Runner:
        """Load the model in this process, on its first GPU if the configuration requires one.

        Raises: SaccadeError if it does not run here.
        """
