# SPDX-License-Identifier: Apache-2.0
"""Run a build in a separate process: its progress, result and failures."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.schema import AGAIN
from saccade.core.worker import Program, Worker, WorkerEnded, WorkRefused
from saccade.exporter.artefact.manifest import DATA_SUFFIX
from saccade.exporter.runtimes.tensorrt.engine_manifest import Profile
from saccade.exporter.runtimes.tensorrt.modules import MODULES, NAMES

_PROGRAM = Path(__file__).with_name("builder.py")
_KEPT = ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "TMPDIR")


@dataclass(frozen=True)
class BuildJob:
    """One engine to build, as requested from the child process."""

    name: str  # the variant's
    engine: str
    onnx: Path
    profiles: dict[str, Profile]
    compute_capabilities: tuple[str, ...] = ()
    workspace_mib: int | None = None
    timing_cache: Path | None = None
    plugins: tuple[Path, ...] = ()

    def request(self) -> dict[str, Any]:
        """Return the JSON that the child reads; the files that it opens have fixed names."""
        return {
            "module": MODULES[self.engine],
            "engine": self.engine,
            "onnx": "model.onnx",
            "profiles": self.profiles,
            "compute_capabilities": self.compute_capabilities,
            "workspace_mib": self.workspace_mib,
            "timing_cache": None if self.timing_cache is None else "timing_cache_in",
            "plugins": [str(path) for path in self.plugins],
        }


@dataclass(frozen=True)
class Network:
    """The network that TensorRT's parser has made from the ONNX file.

    `products` are its matrix layers: name, type, types of the inputs, and origins of the inputs.
    """

    version: str
    inputs: tuple[dict[str, Any], ...]
    outputs: tuple[dict[str, Any], ...]
    layers: int
    products: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class BuildResult:
    """The result of a successful build, as the child reports it."""

    seconds: float


@dataclass(frozen=True)
class BuiltPlan:
    """A finished plan in the work folder, with its network, time and log."""

    plan: Path
    timing_cache: Path | None  # extended by this build
    network: Network
    seconds: float
    log: str  # TensorRT's messages, one per line


def build_in_child(
    job: BuildJob,
    work: Path,
    proved: Callable[[Network], None],
    progressed: Callable[[float], None],
) -> BuiltPlan:
    """Build one engine in the empty folder `work`.

    `proved` is called with the parsed network before the build and may raise. `progressed` is
    called with the share of the build that each step was.

    Raises: SaccadeError if TensorRT refuses or its process dies, and whatever `proved` raises.
    """
    messages: list[tuple[str, str]] = []
    steps = 1

    def said(event: dict[str, Any]) -> None:
        nonlocal steps
        match event["event"]:
            case "message":
                messages.append((event["severity"], event["text"]))
            case "phase":
                steps = max(1, event["steps"])
            case "step":
                progressed(1 / steps)

    _link_inputs(job, work)
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    with Worker(Program(_PROGRAM, work, environment)) as worker:
        try:
            network = worker.ask(job.request(), Network, said=said)
            proved(network)
            done = worker.ask("build", BuildResult, said=said)
        except WorkRefused as refused:
            raise _refusal(job, work, refused.kind, str(refused), messages) from refused
        except WorkerEnded as ended:
            raise _death(job, ended, messages) from ended
    cache = work / "timing_cache" if job.timing_cache is not None else None
    log = "".join(f"{severity}: {text}\n" for severity, text in messages)
    return BuiltPlan(work / "plan", cache, network, done.seconds, log)


def _link_inputs(job: BuildJob, work: Path) -> None:
    try:
        (work / "model.onnx").symlink_to(job.onnx.resolve())
        data = job.onnx.with_name(job.onnx.name + DATA_SUFFIX)
        if data.exists():  # under the name that the ONNX file refers to
            (work / data.name).symlink_to(data.resolve())
        if job.timing_cache is not None:
            (work / "timing_cache_in").symlink_to(job.timing_cache.resolve())
    except OSError as error:
        raise SaccadeError(f"{work}: cannot be written ({error}). Choose another --out.") from error


def _refusal(
    job: BuildJob, work: Path, kind: str, text: str, messages: list[tuple[str, str]]
) -> SaccadeError:
    module = NAMES[job.engine]
    said = _first_error(messages)
    reason = {
        "onnx": f"{module} cannot parse {job.onnx.name}: {text}. {AGAIN}",
        "profile": f"{module} refuses the profile {text}{said}. Pass another --batch or --axis.",
        "capability": f"{module} refuses compute capability {text}{said}. "
        "Pass another --compute-capability.",
        "plugin": f"{module} refuses the plugin library: {text}{said}. Build it again with: "
        "make plugins-tensorrt",
        "timing cache": f"{job.timing_cache}: {module} refuses this timing cache{said}. It was "
        "made by another version or for another GPU. Pass another file, which will be created.",
        "file": f"a file in {work.parent} could not be read or written: {text}. Free some space "
        "there, or choose another place with --out.",
        "build": f"{module} cannot build it{said}. Try a smaller --batch or a larger "
        "--workspace-mib.",
    }
    return SaccadeError(f"{job.name}: {reason[kind]}")


def _death(job: BuildJob, ended: WorkerEnded, messages: list[tuple[str, str]]) -> SaccadeError:
    how = str(ended)
    if how.endswith("SIGKILL"):
        how += ", which the system sends when memory runs out"
    said = _first_error(messages) or (f": {ended.last_words}" if ended.last_words else "")
    return SaccadeError(
        f"{job.name}: the process in which {NAMES[job.engine]} built it failed ({how}){said}. "
        "Nothing was written. Leave this variant out with --variant, or try the other --engine."
    )


def _first_error(messages: list[tuple[str, str]]) -> str:
    for wanted in ("ERROR", "INTERNAL_ERROR"):
        for severity, text in messages:
            if severity == wanted:
                return f": {text}"
    return ""
