# SPDX-License-Identifier: Apache-2.0
"""A runtime in one file: it runs only exported files whose bytes were reversed.

With `"fake": "fake_runtime:FAKE"` in the registry, every command knows it. `FOLDERS` are the
packages of runtimes and of their side of the server, each with the folder that it is added from.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.files import new_folder, sha256_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.runners import Runner, onnx_runner, onnx_session
from saccade.exporter.runtimes.runtime import BuildOptions, Packages
from saccade.plugins.contract import Ops
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.model_checks import differences
from saccade.serving.repository.preflight.repository import RepositoryModel, Target
from saccade.serving.repository.runtimes.served_runtime import (
    ServedFiles,
    ServedRuntime,
    StoredFile,
)
from saccade.serving.repository.stored_sample import read_sample

SERVED_FILE = "model.fake"
_TESTS = Path(__file__).parent
FOLDERS = {
    "saccade.exporter.runtimes": str(_TESTS),
    "saccade.serving.repository.runtimes": str(_TESTS / "fakes" / "served_runtimes"),
}


def run_file(path: Path) -> Runner:
    """Run the file without optimization."""
    return onnx_runner(onnx_session(path.read_bytes()[::-1], optimized=False))


@dataclass(frozen=True)
class FakeFiles:
    """Files that a build wrote."""

    folder: Path

    def to_dict(self) -> dict[str, Any]:
        return {"folder": str(self.folder), "files": self.files()}

    def files(self) -> list[dict[str, Any]]:
        return [
            {
                "name": path.name,
                "bytes": path.stat().st_size,
                "sha256": sha256_of(path),
                "version": "1.0",
                "compute_capabilities": ["any"],
                "build_seconds": 0.0,
            }
            for path in sorted(self.folder.iterdir())
        ]

    def to_text(self) -> str:
        return f"{self.folder}: {len(self.files())} files turned round"


class FakeRuntime:
    """The artefact's side: build, load, run, verify, measure."""

    name = "fake"
    title = "Fake"
    precisions = ("fp32",)
    refusal = "turns no others round"
    packages: Packages | None = Packages(("numpy",), "fake", optional=True, advice="")
    gpu_only = False
    builds = True
    builds_anywhere = True

    def is_here(self) -> bool:
        return True

    def require(self) -> None:
        pass

    def label(self) -> str:
        return "fake 1.0 CPU"

    def has_kernels(self) -> bool:
        return False

    def build(self, artefact: ArtefactFolder, options: BuildOptions) -> FakeFiles:
        out = options.out or artefact.path / "engines" / self.name
        with new_folder(out, force=options.force) as folder:
            for manifest in artefact.manifests:
                data = artefact.file(manifest).read_bytes()
                (folder / f"{manifest.variant.name}.fake").write_bytes(data[::-1])
        return FakeFiles(out)

    def load(
        self, folder: ArtefactFolder, manifest: Manifest, ops: Ops, *, threads: int = 1
    ) -> Runner:
        return run_file(built_file(folder, manifest))

    def peers(self, folder: ArtefactFolder, manifest: Manifest) -> Mapping[str, Runner]:
        there = (folder.path / "engines" / self.name).is_dir()
        return {self.name: run_file(built_file(folder, manifest))} if there else {}


def built_file(folder: ArtefactFolder, manifest: Manifest) -> Path:
    """Return the built file.

    Raises: SaccadeError if it was not built.
    """
    path = folder.path / "engines" / FakeRuntime.name / f"{manifest.variant.name}.fake"
    if not path.is_file():
        raise SaccadeError(f"{path}: missing. Build it with: saccade build {folder} --engine fake")
    return path


def check_answer(model: RepositoryModel, target: Target) -> Iterator[str]:
    """Check that the served file gives the stored answer."""
    sample = read_sample(model.sample)
    answers = run_file(model.version / SERVED_FILE)(sample.inputs)
    yield from differences(answers, sample.answers, model.manifest)


class ServedFake(ServedRuntime):
    """The server's side: options, files, configuration, checks."""

    backend = "fake"
    bundled = False
    models_title = "files turned round"
    server_arguments = ("--backend-config=fake,turn=round",)
    checks = {"answer": check_answer}  # noqa: RUF012

    def check_options(self, options: RepositoryOptions) -> None:
        if options.instances == "gpu":
            raise SaccadeError("--instances gpu: the fake has none.")

    def component_files(
        self, folder: ArtefactFolder, options: RepositoryOptions, max_images: int
    ) -> dict[str, ServedFiles]:
        served = {}
        for manifest in folder.manifests:
            path = built_file(folder, manifest)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            files = {f"1/{SERVED_FILE}": StoredFile(path, digest)}
            served[manifest.variant.name] = ServedFiles(files, self.fields)
        return served

    def fields(self, run_batch: int, threads: int) -> dict[str, Any]:
        return {"backend": self.backend, "default_model_filename": SERVED_FILE}

    def config_fields(
        self, model: RepositoryModel, options: RepositoryOptions, run_batch: int
    ) -> dict[str, Any]:
        return self.fields(run_batch, 1)

    def files(self, model: RepositoryModel) -> set[str]:
        return {f"1/{SERVED_FILE}"}

    def weights_bytes(self, model: RepositoryModel) -> int:
        return (model.version / SERVED_FILE).stat().st_size

    def runner(self, model: RepositoryModel) -> Runner:
        return run_file(model.version / SERVED_FILE)


FAKE, SERVED = FakeRuntime(), ServedFake()
