# SPDX-License-Identifier: Apache-2.0
"""Folder of a component in a repository: its file or plans, configuration, labels and sample."""

from dataclasses import dataclass
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.core.files import copy_file, json_bytes, sha256_of
from saccade.exporter.artefact.manifest import DATA_SUFFIX, SUFFIX, Manifest
from saccade.serving.repository.model_config import MODEL_FILE, Served, variant_config
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.router_folder import write_labels
from saccade.serving.repository.runtimes.served_runtime import ServedFiles, StoredFile
from saccade.serving.repository.stored_sample import Sample, write_sample


@dataclass(frozen=True)
class ComponentPlan:
    """Everything that is known about a component before its folder is written."""

    manifest: Manifest
    run_batch: int
    threads: int
    sample: Sample
    options: RepositoryOptions
    served: ServedFiles

    @property
    def name(self) -> str:
        """Name of the component, of its file and of its folder."""
        return self.manifest.variant.name


def write_component(place: Path, component: ComponentPlan, *, refer: bool = False) -> None:
    """Write the folder of one component of a variant; with `refer`, a link to its ONNX file.

    Raises: SaccadeError if a file changes while it is copied.
    """
    manifest = component.manifest
    (place / "1").mkdir(parents=True)
    for name, file in component.served.files.items():
        if not (refer and _linked(file, place / name)):
            _store(file, place / name)
    # The manifest, for users who have the repository but not the artefact folder.
    (place / (component.name + SUFFIX)).write_bytes(json_bytes(manifest.to_dict()))
    served = Served(
        fields=component.served.fields(component.run_batch, component.threads),
        options=component.options,
        max_batch=component.served.max_batch,
        sample=component.sample.shapes,
    )
    config = variant_config(
        manifest, run_batch=component.run_batch, served=served, labelled=bool(manifest.labels)
    )
    (place / "config.pbtxt").write_text(config, "utf-8")
    write_labels(place, manifest.labels)
    write_sample(place, component.sample)


def _linked(file: StoredFile, target: Path) -> bool:
    """Link to an ONNX file, whose bytes have been checked, if the file system has links."""
    is_model = target.name == MODEL_FILE or target.name.endswith(f".onnx{DATA_SUFFIX}")
    if isinstance(file.source, bytes) or not is_model:
        return False  # a link to a plan is refused when it is opened
    try:
        target.symlink_to(file.source.resolve())
    except OSError:
        return False
    return True


def _store(file: StoredFile, target: Path) -> None:
    if isinstance(file.source, bytes):
        target.write_bytes(file.source)
        return
    copy_file(file.source, target)
    if sha256_of(target) != (file.sha256 or sha256_of(file.source)):
        raise SaccadeError(f"{file.source}: changed while it was copied. Run the command again.")
