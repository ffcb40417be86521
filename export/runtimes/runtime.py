# SPDX-License-Identifier: Apache-2.0
"""The protocol of runtimes, their only registry, and `saccade build`.

Code that depends on a property of a runtime queries this protocol and never compares names. The
server's side (options, files, configuration, checks) is a `ServedRuntime`, which serving finds by
the runtime's name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

from saccade.core.checks import check_one_of
from saccade.core.errors import MissingPackage, SaccadeError
from saccade.core.options import Options, choice_of
from saccade.core.progress import Report, bar, reporting
from saccade.core.schema import Range
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.runtimes.runners import Runner
from saccade.models.entry import imported
from saccade.plugins.contract import Ops

_MOST_MIB = 2**20
if TYPE_CHECKING:
    EngineName = str
else:
    EngineName = choice_of(f"{__name__}:engine_names")


@dataclass(frozen=True)
class BuildOptions(Options):
    """Build an engine for each variant of an artefact folder, after verifying its types."""

    # tensorrt or tensorrt-rtx; default: the first one that is installed
    engine: EngineName | None = None
    variant: tuple[str, ...] = ()  # names of variants to build; default: all
    batch: str = "1:8:64"  # smallest, usual and largest number of samples
    axis: tuple[str, ...] = ()  # ranges of other dynamic axes, such as k=1:7:16
    # scratch memory of an engine; default: TensorRT's
    workspace_mib: Annotated[int, Range(1, _MOST_MIB)] | None = None
    timing_cache: Path | None = None  # reused and extended; TensorRT only
    # of the GPUs, such as 8.9,12.0; default: this one's, else 8.9
    compute_capability: tuple[str, ...] = ()
    out: Path | None = None  # default: ARTEFACT/engines/ENGINE-CAPABILITIES
    force: bool = False  # replace an existing folder


# By the name used in options, manifests, frontiers and repositories: a module of this folder, and
# the runtime in it.
RUNTIMES = {
    "onnxruntime": "onnxruntime:ONNXRUNTIME",
    "openvino": "openvino.runtime:OPENVINO",
    "tensorrt": "tensorrt.runtime:TENSORRT",
    "tensorrt-rtx": "tensorrt.runtime:TENSORRT_RTX",
}
DEFAULT = "onnxruntime"  # runs an exported file directly

if TYPE_CHECKING:
    RuntimeName = str
else:
    RuntimeName = choice_of("saccade.exporter.runtimes.runtime:runtime_names")


@dataclass(frozen=True)
class Packages:
    """Packages that a runtime requires: one of these distributions."""

    distributions: tuple[str, ...]
    needed_for: str  # the uses that need it, as `saccade doctor` lists them
    optional: bool
    advice: str  # how to install it
    conflict: str = ""  # what to do if several are installed


class BuiltFolder(Protocol):
    """The output folder of a build."""

    @property
    def folder(self) -> Path: ...

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""

    def files(self) -> list[dict[str, Any]]:
        """Return name, bytes, sha256, version, compute_capabilities, build_seconds per file."""

    def to_text(self) -> Any:
        """Return a table for a terminal."""


class Runtime(Protocol):
    """One way to run the variants of an artefact folder."""

    name: str  # as in options, manifests, frontiers and repositories
    title: str  # for messages
    precisions: tuple[str, ...]  # of variants that it can run
    refusal: str  # why it cannot run the others, as in "..., which <title> <refusal>"
    packages: Packages | None  # what `saccade doctor` looks for
    gpu_only: bool  # whether it runs only on GPUs
    builds: bool  # whether it needs a file built from the exported one
    builds_anywhere: bool  # whether any machine can build for a device that it lacks

    def is_here(self) -> bool:
        """True if it is installed; does not import it."""

    def require(self) -> None:
        """Check that it can be imported.

        Raises: MissingPackage, with what to install, if it cannot.
        """

    def label(self) -> str:
        """Return name, version and kind of device, the key of measurements in a frontier."""

    def has_kernels(self) -> bool:
        """True if custom ops run as kernels here; otherwise they run as function bodies."""

    def build(self, artefact: ArtefactFolder, options: BuildOptions) -> BuiltFolder:
        """Build a file for each variant.

        Raises: SaccadeError for what cannot be built, MissingPackage if it is not installed.
        """

    def load(
        self, folder: ArtefactFolder, manifest: Manifest, ops: Ops, *, threads: int = 1
    ) -> Runner:
        """Load one file of an artefact folder.

        Raises: SaccadeError if it is not built or cannot run here.
        """

    def peers(self, folder: ArtefactFolder, manifest: Manifest) -> Mapping[str, Runner]:
        """Return further ways to run a file on this machine, which the gate checks as well.

        Raises: SaccadeError for one that should run here but fails.
        """


def runtime_named(name: str) -> Runtime:
    """Return the runtime of that name.

    Raises: SaccadeError if there is no such runtime.
    """
    check_one_of("runtime", name, RUNTIMES)
    return cast(Runtime, imported(f"{__package__}.{RUNTIMES[name]}"))


def runtimes() -> tuple[Runtime, ...]:
    """Return all runtimes, in the registry's order."""
    return tuple(map(runtime_named, RUNTIMES))


def loaded(
    runtime: Runtime,
    folder: ArtefactFolder,
    manifests: Iterable[Manifest],
    ops: Ops,
    *,
    threads: int = 1,
) -> dict[str, Runner]:
    """Load the components of a variant; by role.

    Raises: SaccadeError for one that is not built or cannot run here.
    """
    return {
        manifest.variant.role: runtime.load(folder, manifest, ops, threads=threads)
        for manifest in manifests
    }


def runtime_names() -> tuple[str, ...]:
    """Return the names of all runtimes."""
    return tuple(RUNTIMES)


def engine_names() -> tuple[str, ...]:
    """Return the names of the runtimes that build engines."""
    return tuple(runtime.name for runtime in runtimes() if runtime.builds)


def peers_of(folder: ArtefactFolder, manifest: Manifest) -> dict[str, Runner]:
    """Return every further way to run a file on this machine, by its description.

    Raises: SaccadeError for one that should run here but fails.
    """
    return {
        name: run for runtime in runtimes() for name, run in runtime.peers(folder, manifest).items()
    }


def ops_of(runtime: Runtime, manifests: Iterable[Manifest], *, kernels: bool = True) -> Ops:
    """Return how the runtime executes the custom ops of these files; None if they have none.

    Without `kernels`, ops run as function bodies.
    """
    if not has_custom_ops(manifests):
        return None
    return "kernels" if kernels and runtime.has_kernels() else "bodies"


def has_custom_ops(manifests: Iterable[Manifest]) -> bool:
    """True if one of the files uses a custom op."""
    return any(manifest.custom_ops for manifest in manifests)


def build(
    artefact: ArtefactFolder | Path | str,
    options: BuildOptions,
    *,
    progress: Report | None = bar,
) -> BuiltFolder:
    """Build every variant of an artefact folder for one runtime.

    The output folder is created only when every variant was built.

    Raises: GateFailed if a variant would compute in other types than it promises, SaccadeError for
        an option or a file that cannot be built, MissingPackage if the runtime is not installed.
    """
    with reporting(progress):
        return builder(options.engine).build(ArtefactFolder.open(artefact), options)


def builder(engine: str | None) -> Runtime:
    """Return the runtime named `engine`; by default the first installed one that builds engines.

    Raises: SaccadeError if it does not build engines, MissingPackage if none is installed.
    """
    if engine is not None:
        runtime = runtime_named(engine)
        if not runtime.builds:
            raise SaccadeError(
                f"--engine {engine}: {runtime.title} runs the exported files directly, so there is "
                f"nothing to build. Expected one of: {', '.join(engine_names())}."
            )
        return runtime
    every = [runtime_named(name) for name in engine_names()]
    if here := next((runtime for runtime in every if runtime.is_here()), None):
        return here
    # `require` reports what is missing and how to install it.
    every[0].require()
    raise MissingPackage(f"{every[0].title} is not installed.")
