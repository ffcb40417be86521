# SPDX-License-Identifier: Apache-2.0
"""The report of the checks, the server they are for, and a repository as they see it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from saccade.core.errors import SaccadeError, require
from saccade.core.files import read_regular
from saccade.core.machine import memory_limit_bytes
from saccade.core.sizes import counted
from saccade.exporter.artefact.manifest import SUFFIX, Manifest, read_manifest
from saccade.exporter.runtimes.gpu import Gpu, gpus
from saccade.serving.repository.description import Deployment, read_description
from saccade.serving.repository.installation import BUNDLED_LINE, as_numbers
from saccade.serving.repository.model_config import (
    LABELS_FILE,
    MODEL_FILE,
    plain_fields,
    read_config,
)
from saccade.serving.repository.router_folder import MAX_ROUTES_BYTES
from saccade.serving.repository.runtimes.registry import served_runtime
from saccade.serving.repository.stored_sample import FILE, FOLDER

if TYPE_CHECKING:
    from saccade.exporter.runtimes.tensorrt.engine_manifest import EngineManifest

Verdict = Literal["passed", "failed", "not checked"]
_MARKS = {"passed": "ok", "failed": "FAILED", "not checked": "-"}


class NotChecked(Exception):
    """Raised when a check cannot be made here; the message gives the reason."""


@dataclass(frozen=True)
class Finding:
    """One check of one model, or of the whole repository (`model` is empty)."""

    check: str
    model: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreflightReport:
    """All findings, and the server that the repository was checked for."""

    repository: str
    server: str
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> tuple[Finding, ...]:
        """Findings that would make a server fail or give wrong answers."""
        return tuple(finding for finding in self.findings if finding.verdict == "failed")

    @property
    def passed(self) -> bool:
        """True if no check failed; checks that were not made do not count."""
        return not self.failed

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "repository": self.repository,
            "server": self.server,
            "passed": self.passed,
            "findings": [asdict(finding) for finding in self.findings],
        }

    @property
    def exit_code(self) -> int:
        """Exit status of the command: 1 if any check failed, else 0."""
        return 0 if self.passed else 1

    def to_text(self) -> str:
        """Return the report as text: every reason, and the number of checks that passed."""
        lines = []
        for finding in self.findings:
            where = f"{finding.model}: " if finding.model else ""
            for reason in finding.reasons:
                lines.append(f"{_MARKS[finding.verdict]:6} {where}{finding.check}: {reason}")
        passed, failed = sum(f.verdict == "passed" for f in self.findings), len(self.failed)
        verdict = "ready to serve. " if self.passed else f"{counted(failed, 'check')} failed, "
        lines.append(
            f"{self.repository}: {verdict}{counted(passed, 'check')} passed for {self.server}."
        )
        return "\n".join(lines)


# Triton's own version number -> the release of the container.
_SERVER_VERSIONS = {"2.51": "24.10", "2.51.0": "24.10"}


@dataclass(frozen=True)
class Target:
    """The server and machine that the checks compare the repository with."""

    line: str = BUNDLED_LINE  # NVIDIA's release, YY.MM
    bundled: bool = True  # the server of the pip package, with saccade's Python backend
    tensorrt: str | None = None  # the server's TensorRT version, if the user named it
    memory_bytes: int | None = None
    gpus: tuple[Gpu, ...] = ()

    @property
    def title(self) -> str:
        """Description of the server for messages."""
        return f"the bundled server ({self.line})" if self.bundled else f"the container {self.line}"


def target_of(
    server_version: str | None, tensorrt: str | None, memory_mib: int | None, runtime: str
) -> Target:
    """Return the target that the user named.

    Without a version it is the bundled server, or a container where the repository has plans.

    Raises: SaccadeError if the version is malformed, or older than saccade supports.
    """
    memory = memory_mib * 2**20 if memory_mib else memory_limit_bytes()
    bundled = server_version is None and served_runtime(runtime).bundled
    line = _SERVER_VERSIONS.get(server_version or BUNDLED_LINE, server_version or BUNDLED_LINE)
    if not re.fullmatch(r"2[0-9]\.(0[1-9]|1[0-2])", line):
        raise SaccadeError(
            f"--server-version is {server_version!r}, expected the version in a container's tag, "
            f"such as {BUNDLED_LINE} (server 2.51)."
        )
    if as_numbers(line) < as_numbers(BUNDLED_LINE):
        raise SaccadeError(
            f"--server-version is {line}, expected {BUNDLED_LINE} (server 2.51) or newer. Use a "
            "newer container."
        )
    return Target(line, bundled, tensorrt, memory, gpus())


@contextmanager
def not_checked_without(what: str) -> Iterator[None]:
    """Refuse checks that need what cannot be read, which fails its own check."""
    try:
        yield
    except SaccadeError:
        raise NotChecked(f"{what} cannot be read") from None


@dataclass(frozen=True)
class RepositoryModel:
    """One model's folder.

    A file that cannot be read fails its own check and raises `NotChecked` in all others.
    """

    folder: Path
    runtime: str
    sampled: bool = False  # whether the description lists a stored sample

    @property
    def served(self) -> Any:
        """The `ServedRuntime` that writes and checks such a folder."""
        return served_runtime(self.runtime)

    @property
    def name(self) -> str:
        """Name of the model on the server."""
        return self.folder.name

    @property
    def version(self) -> Path:
        """The folder of the only version."""
        return self.folder / "1"

    @property
    def model(self) -> Path:
        """The ONNX file."""
        return self.version / MODEL_FILE

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the ONNX file and its data file, if the manifest lists one."""
        try:
            data = self.manifest.file.data
        except NotChecked:
            data = None
        return (MODEL_FILE, data.name) if data else (MODEL_FILE,)

    @property
    def sample(self) -> Path:
        """The stored sample."""
        return self.folder / FOLDER / FILE

    @cached_property
    def config(self) -> Any:
        """The parsed configuration; `NotChecked` if it cannot be read."""
        with not_checked_without("the configuration"):
            return self.parsed_config()

    def parsed_config(self) -> Any:
        """Return the parsed configuration.

        Raises: SaccadeError if the text cannot be parsed.
        """
        return read_config(self.folder / "config.pbtxt")

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The configuration as plain data."""
        return plain_fields(self.config)

    @cached_property
    def labels(self) -> list[str]:
        """The model's labels, one per line of the file.

        Raises: SaccadeError if they cannot be read.
        """
        try:
            return (self.folder / LABELS_FILE).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SaccadeError(f"{LABELS_FILE} cannot be read ({error}).") from error

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of the exported file."""
        with not_checked_without("the manifest"):
            return read_manifest(self.folder / (self.name + SUFFIX))

    @cached_property
    def engines(self) -> "dict[str, EngineManifest]":
        """The manifests of the plans, by compute capability."""
        engines = {}
        for path in sorted(self.folder.glob("engine-*.json")):
            with not_checked_without(path.name):
                engines[path.stem.removeprefix("engine-")] = read_engine(path)
        return engines

    @cached_property
    def proto(self) -> Any:
        """The parsed ONNX file, if it stays within the limits of graphs."""
        require("onnx", extra="export")
        from saccade.exporter.graph.model_file import read_model

        try:
            proto, _ = read_model(self.model, self.manifest.file, MODEL_FILE)
        except SaccadeError as error:
            raise NotChecked(str(error).rstrip(".")) from error
        if not proto.graph.node:
            raise NotChecked(f"{MODEL_FILE} has no node")
        return proto


@dataclass(frozen=True)
class Repository:
    """A repository with a readable description."""

    folder: Path
    deployment: Deployment
    files: dict[str, str]

    @property
    def models(self) -> tuple[RepositoryModel, ...]:
        """The variants' models, without those whose names cannot be folders."""
        said = self.deployment
        return tuple(
            RepositoryModel(self.folder / name, said.runtime, name in said.samples)
            for name in said.variants
            if _is_plain(name) and (self.folder / name).is_dir()
        )

    @property
    def router(self) -> RepositoryModel:
        """The router's folder."""
        return RepositoryModel(self.folder / self.deployment.model, self.deployment.runtime)

    @cached_property
    def routes(self) -> dict[str, Any]:
        """The router's routes to its variants."""
        path = self.router.version / "routes.json"
        try:
            content: dict[str, Any] = json.loads(read_regular(path, MAX_ROUTES_BYTES))
            _ = content["family"], content["variants"], content["preprocessing"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise NotChecked(f"routes.json cannot be read ({error!r:.200})") from error
        return content


def open_repository(folder: Path) -> Repository:
    """Open the repository in a folder.

    Raises: SaccadeError if the folder is not a repository.
    """
    deployment, files = read_description(folder)
    return Repository(folder, deployment, files)


def _is_plain(name: str) -> bool:
    return name == Path(name).name and name not in ("", ".", "..")


def read_engine(path: Path) -> "EngineManifest":
    """Read the manifest of a plan in a repository, such as `engine-8.9.json`.

    Raises: SaccadeError if `read_engine_manifest` refuses it.
    """
    from saccade.exporter.runtimes.tensorrt.engine_manifest import read_engine_manifest

    # In a folder of engines the manifest is named after its variant.
    return read_engine_manifest(path, path.parent.name + SUFFIX)
