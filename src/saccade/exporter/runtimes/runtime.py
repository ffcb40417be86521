# SPDX-License-Identifier: Apache-2.0
"""Runtimes of artefacts: their protocol, and the one registry of them.

Whatever else asks about a runtime, asks it; nobody compares its name. The server's side of one
(options, files, configuration, checks) is a `ServedRuntime`, which `served` names.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from saccade.choice import choice_of
from saccade.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.options import BuildOptions
from saccade.exporter.runtimes.runners import Runner
from saccade.models.entry import imported
from saccade.plugins.execution import Ops

# By the name that options, manifests, frontiers and repositories say; a line each.
RUNTIMES = {
    "onnxruntime": "saccade.exporter.runtimes.onnxruntime:ONNXRUNTIME",
    "tensorrt": "saccade.exporter.runtimes.tensorrt.runtime:TENSORRT",
    "tensorrt-rtx": "saccade.exporter.runtimes.tensorrt.runtime:TENSORRT_RTX",
}
DEFAULT = "onnxruntime"  # what runs an exported file as it is

if TYPE_CHECKING:
    RuntimeName = str
else:
    RuntimeName = choice_of("saccade.exporter.runtimes.runtime:runtime_names")


@dataclass(frozen=True)
class Packages:
    """Requirement of a runtime on the machine: one of these distributions."""

    distributions: tuple[str, ...]
    needed_for: str  # the uses that lack it, as `saccade doctor` lists them
    optional: bool
    advice: str  # how to install it
    conflict: str = ""  # what to do where several are installed


class Built(Protocol):
    """The folder that a build wrote."""

    @property
    def folder(self) -> Path: ...

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""

    def files(self) -> list[dict[str, Any]]:
        """Each file's name, bytes, sha256, version, compute_capabilities and build_seconds."""

    def to_text(self) -> Any:
        """For a terminal."""


class Runtime(Protocol):
    """One way to run the variants of an artefact folder."""

    name: str  # as options, manifests, frontiers and repositories say it
    title: str  # for a reader
    precisions: tuple[str, ...]  # of the variants that it runs
    refusal: str  # why it does not run the others: "..., which <title> <refusal>"
    packages: Packages | None  # what has to be installed, where `saccade doctor` looks for it
    gpu_only: bool  # whether it runs on GPUs alone
    builds: bool  # whether a file of its own has to be built of the exported one
    builds_anywhere: bool  # whether it builds on any machine, for another that has the device
    # `module:attribute` of its `ServedRuntime`; none: no server loads what it builds
    served: str | None

    def is_here(self) -> bool:
        """True if it is installed; imports nothing."""

    def require(self) -> None:
        """Raises: MissingPackage, with what to install, if it cannot be imported."""

    def label(self) -> str:
        """Name, version and kind of device, as a frontier files its measurements."""

    def has_kernels(self) -> bool:
        """True if custom ops run by our kernels here, else by their function bodies."""

    def build(self, artefact: ArtefactFolder, options: BuildOptions) -> Built:
        """Build a file of each variant.

        Raises: SaccadeError for what cannot be built, MissingPackage if it is not installed.
        """

    def load(
        self, folder: ArtefactFolder, manifest: Manifest, ops: Ops, *, threads: int = 1
    ) -> Runner:
        """One file of an artefact folder, ready to run.

        Raises: SaccadeError if it is not built, or does not run here.
        """

    def peers(self, folder: ArtefactFolder, manifest: Manifest) -> Mapping[str, Runner]:
        """Forms of it on this machine that the gate holds to the reference beside the file itself.

        Raises: SaccadeError for what should run here and does not.
        """


def runtime_named(name: str) -> Runtime:
    """The runtime of that name.

    Raises: SaccadeError if there is none.
    """
    if name not in RUNTIMES:
        raise SaccadeError(
            f"runtime {name!r:.100} is unknown. Expected one of: {', '.join(RUNTIMES)}."
        )
    return cast(Runtime, imported(RUNTIMES[name]))


def runtimes() -> tuple[Runtime, ...]:
    """All of them, in the registry's order."""
    return tuple(map(runtime_named, RUNTIMES))


def loaded(
    runtime: Runtime, folder: ArtefactFolder, manifests: Iterable[Manifest], ops: Ops
) -> dict[str, Runner]:
    """The components of a variant, ready to run on one thread, by role.

    Raises: SaccadeError for one that is not built, or does not run here.
    """
    return {manifest.variant.role: runtime.load(folder, manifest, ops) for manifest in manifests}


def runtime_names() -> tuple[str, ...]:
    """All of them."""
    return tuple(RUNTIMES)


def engine_names() -> tuple[str, ...]:
    """Those that build files of their own."""
    return tuple(runtime.name for runtime in runtimes() if runtime.builds)


def peers_of(folder: ArtefactFolder, manifest: Manifest) -> dict[str, Runner]:
    """Every further way to run that file which this machine has, by what it is called.

    Raises: SaccadeError for one that should run here and does not.
    """
    return {
        name: run for runtime in runtimes() for name, run in runtime.peers(folder, manifest).items()
    }


def ops_of(runtime: Runtime, manifests: Iterable[Manifest], *, kernels: bool = True) -> Ops:
    """Execution of these files' custom ops by the runtime, none where no file calls one.

    Without `kernels` by their bodies.
    """
    if not has_custom_ops(manifests):
        return None
    return "kernels" if kernels and runtime.has_kernels() else "bodies"


def has_custom_ops(manifests: Iterable[Manifest]) -> bool:
    """True if one of the files calls an op of ours."""
    return any(manifest.custom_ops for manifest in manifests)
