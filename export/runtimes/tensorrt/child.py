# SPDX-License-Identifier: Apache-2.0
"""A build in a process of its own: what it reports as it goes, and how it may end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from saccade.errors import SaccadeError
from saccade.export.runtimes.tensorrt.builder import STEADY
from saccade.export.runtimes.tensorrt.engine_manifest import Profile
from saccade.export.runtimes.tensorrt.modules import MODULES, NAMES

_KEPT = ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "TMPDIR")
_TAIL = 400  # characters of what a dead process has said last


@dataclass(frozen=True)
class Job:
    """One engine to build, as the child is asked for it."""

    name: str  # the variant's
    engine: str
    onnx: Path
    profiles: dict[str, Profile]
    compute_capabilities: tuple[str, ...] = ()
    workspace_mib: int | None = None
    timing_cache: Path | None = None
    plugins: tuple[Path, ...] = ()

    def request(self) -> dict[str, Any]:
        """The JSON that the child reads; files that it opens have fixed names in its folder."""
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
    """What TensorRT's parser has made of the ONNX file.

    `products` are its matrix layers: name, type, types of the inputs, where those come from.
    """

    version: str
    inputs: tuple[dict[str, Any], ...]
    outputs: tuple[dict[str, Any], ...]
    layers: int
    products: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, event: dict[str, Any]) -> "Network":
        """As the child describes it."""
        inputs, outputs, products = (
            tuple(event[each]) for each in ("inputs", "outputs", "products")
        )
        return cls(event["version"], inputs, outputs, event["layers"], products)


@dataclass(frozen=True)
class Built:
    """A finished plan in the work folder, and how it came about."""

    plan: Path
    timing_cache: Path | None  # extended by this build
    network: Network
    seconds: float
    fixed_addresses: bool
    log: str  # TensorRT's messages, one a line


def build_in_child(
    job: Job,
    work: Path,
    proved: Callable[[Network], None],
    progressed: Callable[[float], None],
) -> Built:
    """Build one engine in the empty folder `work`; `proved` sees the network and may raise first.

    `progressed` is told which share of the build each step was.

    Raises: SaccadeError if TensorRT refuses, or its process dies; what `proved` raises.
    """
    messages: list[tuple[str, str]] = []
    network: Network | None = None
    seconds, steps = 0.0, 1
    with _process(job, work) as process:
        for event in _events(process):
            match event.pop("event"):
                case "message":
                    messages.append((event["severity"], event["text"]))
                case "network":
                    network = Network.of(event)
                    proved(network)
                    _tell(process, "build\n")
                case "phase":
                    steps = max(1, event["steps"])
                case "step":
                    progressed(1 / steps)
                case "built":
                    seconds = event["seconds"]
                case "refused":
                    raise _refusal(job, work, event["kind"], event["text"], messages)
                case "done" if network is not None:
                    cache = work / "timing_cache" if job.timing_cache is not None else None
                    log = "".join(f"{severity}: {text}\n" for severity, text in messages)
                    fixed = event["fixed_addresses"]
                    return Built(work / "plan", cache, network, seconds, fixed, log)
        raise _death(job, process.wait(), work, messages)


@contextmanager
def _process(job: Job, work: Path) -> Iterator[subprocess.Popen[str]]:
    try:
        (work / "request.json").write_text(json.dumps(job.request()), "utf-8")
        (work / "model.onnx").symlink_to(job.onnx.resolve())
        if job.timing_cache is not None:
            (work / "timing_cache_in").symlink_to(job.timing_cache.resolve())
        stderr = (work / "stderr").open("wb")
    except OSError as error:
        raise SaccadeError(f"{work}: cannot be written ({error}). Choose another --out.") from error
    with stderr:
        # A session of its own: Ctrl-C comes to this process, which then ends the child.
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("builder.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            encoding="utf-8",
            errors="replace",
            cwd=work,
            env=_environment(),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _environment() -> dict[str, str]:
    # Nothing else of the caller's: what Python copies of it moves the addresses of what follows.
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | STEADY


def _events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    for line in cast(IO[str], process.stdout):
        # A library may print what it likes; only the builder's own lines are objects.
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError:
                continue


def _tell(process: subprocess.Popen[str], words: str) -> None:
    stdin = cast(IO[str], process.stdin)
    try:
        stdin.write(words)
        stdin.flush()
    except BrokenPipeError:
        pass  # it died: the end of its output says how


def _refusal(
    job: Job, work: Path, kind: str, text: str, messages: list[tuple[str, str]]
) -> SaccadeError:
    module = NAMES[job.engine]
    said = _first_error(messages)
    reason = {
        "onnx": f"{module} cannot parse {job.onnx.name}: {text}. "
        "Export it again with: saccade export CHECKPOINT",
        "profile": f"{module} refuses the profile {text}{said}. Pass another --batch or --axis.",
        "capability": f"{module} refuses compute capability {text}{said}. "
        "Pass another --compute-capability.",
        "plugin": f"{module} refuses the plugin library: {text}{said}. Build it again with: "
        "make plugins-tensorrt",
        "timing cache": f"{job.timing_cache}: {module} refuses this timing cache{said}. It was "
        "made by another version or for another GPU: name another file, which will be made.",
        "file": f"a file in {work.parent} could not be read or written: {text}. Make room there, "
        "or choose another place with --out.",
        "build": f"{module} cannot build it{said}. Try a smaller --batch or a larger "
        "--workspace-mib.",
    }
    return SaccadeError(f"{job.name}: {reason[kind]}")


def _death(job: Job, code: int, work: Path, messages: list[tuple[str, str]]) -> SaccadeError:
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", as the system does when memory runs out"
    else:
        how = f"ended with {code} and no answer"
    last = (work / "stderr").read_text("utf-8", errors="replace").strip()[-_TAIL:]
    said = _first_error(messages) or (f": {last}" if last else "")
    return SaccadeError(
        f"{job.name}: the process in which {NAMES[job.engine]} built it {how}{said}. Nothing was "
        "written. Leave this variant out with --variant, or try the other --engine."
    )


def _first_error(messages: list[tuple[str, str]]) -> str:
    for wanted in ("ERROR", "INTERNAL_ERROR"):
        for severity, text in messages:
            if severity == wanted:
                return f": {text}"
    return ""
