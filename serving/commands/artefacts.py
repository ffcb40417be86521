# SPDX-License-Identifier: Apache-2.0
"""Commands on artefacts and servers: what each takes and answers; the verbs are elsewhere."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from saccade.errors import SaccadeError
from saccade.export.exported import ExportOptions
from saccade.export.runtimes.options import BuildOptions
from saccade.serving.bench.bench import BenchOptions
from saccade.serving.commands.demo import DemoOptions
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.verb import PreflightOptions
from saccade.serving.server.server import ServeOptions

# The fields of an options dataclass appear as flags of the command itself.
flat = tyro.conf.arg(name="")


@dataclass(frozen=True)
class Answer:
    """What a command found: for a machine, for a reader, and as an exit code."""

    data: Any
    text: Any = None
    as_json: bool = False
    exit_code: int = 0


def export(
    checkpoint: Positional[Path],
    options: Annotated[ExportOptions, flat],
    json: bool = False,
) -> Answer:
    """Export a checkpoint to ONNX at several budgets, each proved against the checkpoint.

    Args:
        checkpoint: a .safetensors file written by saccade.
        json: machine-readable answer on standard output.
    """
    from saccade.export.exported import export as verb
    from saccade.export.gate.report import render

    exported = verb(checkpoint, options)
    return Answer(exported.to_dict(), render(exported.report), json)


def verify(folder: Positional[Path], bisect: bool = False, json: bool = False) -> Answer:
    """Run the parity gate on every variant of a folder; exit 1 if any fails.

    Args:
        folder: what `saccade export` wrote.
        bisect: also name the first node of each variant's graph that departs.
        json: machine-readable answer on standard output.
    """
    from saccade.export.gate.gate import verify as verb
    from saccade.export.gate.report import render

    report = verb(folder)
    data: dict[str, Any] = report.to_dict()
    text: Any = render(report)
    if bisect:
        from rich.console import Group

        from saccade.export.gate.bisect import bisect as first_departures

        found = first_departures(report)
        data["bisect"] = found.to_dict()["departures"]
        text = Group(text, "\n".join(row.to_text() for row in found.rows))
    return Answer(data, text, json, exit_code=0 if report.passed else 1)


def bench(
    folder: Positional[Path],
    options: Annotated[BenchOptions, flat],
    json: bool = False,
) -> Answer:
    """Measure score and throughput of each variant, in process and through a server.

    Args:
        folder: what `saccade export` wrote; frontier.json is written into it.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.bench.bench import bench as verb
    from saccade.serving.bench.report import render

    report = verb(folder, options)
    return Answer(report.to_dict(), render(report.to_dict()), json)


def repository(
    folder: Positional[Path],
    options: Annotated[RepositoryOptions, flat],
    json: bool = False,
) -> Answer:
    """Write the model repository that a Triton server loads.

    Args:
        folder: what `saccade export` wrote, best after `saccade bench`.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.repository.deploy import deploy

    deployment = deploy(folder, options)
    # Plans and GPU instances are for the container: the bundled server runs neither.
    how = " --print-command --container" if options.on_gpu else ""
    ops = f" Custom ops run by {deployment.ops}." if deployment.ops else ""
    text = (
        f"{deployment.folder}: router {deployment.model} before {', '.join(deployment.variants)}."
        f"{ops}\nServe it with: saccade serve {shlex.quote(str(deployment.folder))}{how}"
    )
    return Answer(deployment.to_dict(), text, json)


def serve(
    repository: Positional[Path],
    options: Annotated[ServeOptions, flat],
    print_command: bool = False,
    container: bool = False,
    json: bool = False,
) -> Answer:
    """Start the server in the foreground and watch over it; Ctrl-C stops it.

    Args:
        repository: what `saccade repository` wrote.
        print_command: start nothing; print the command that serves it without supervision.
        container: with --print-command, the command for NVIDIA's container.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.server.server import serve as verb

    if print_command or container:
        return _printed(repository, options, print_command, container, json)
    return Answer({"stopped": str(repository)}, None, json, exit_code=verb(repository, options))


def _printed(
    repository: Path, options: ServeOptions, asked: bool, container: bool, json: bool
) -> Answer:
    from saccade.serving.server.print_command import as_text, print_command

    if not asked:
        raise SaccadeError(
            "--container: saccade serve starts the embedded server only. "
            "Add --print-command for the container's command."
        )
    words = print_command(repository, options, container=container)
    return Answer({"command": list(words)}, as_text(words), json)


def demo(options: Annotated[DemoOptions, flat], json: bool = False) -> Answer:
    """Run the whole path on real digits: train, export, verify, serve, classify, benchmark.

    Args:
        json: machine-readable answer on standard output.
    """
    from saccade.serving.commands.demo import demo as verb

    report, text = verb(options)
    return Answer(report, text, json)


def ops(build: bool = False, json: bool = False) -> Answer:
    """The custom ops, their attributes, and which implementations can run here.

    Args:
        build: first build the library for ONNX Runtime and torch, if it is not built yet.
        json: machine-readable answer on standard output.
    """
    from saccade.plugins import onnxruntime_library
    from saccade.plugins.availability import describe

    if build:
        onnxruntime_library()
    found = describe()
    return Answer(found, ops_table(found), json)


def doctor(url: str | None = None, json: bool = False) -> Answer:
    """What is installed, what is missing for which use, and how to get it.

    Args:
        url: also ask the server at this gRPC address whether every variant answers.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.commands.doctor import doctor as verb
    from saccade.serving.commands.doctor import render

    report = verb(url)
    return Answer(report.to_dict(), render(report), json, exit_code=report.exit_code)


def preflight(
    repository: Positional[Path],
    options: Annotated[PreflightOptions, flat],
    json: bool = False,
) -> Answer:
    """Check a repository for what would make the server fail late; exit 1 if anything would.

    Args:
        repository: what `saccade repository` wrote.
        json: machine-readable answer on standard output.
    """
    from saccade.serving.repository.preflight.report import render
    from saccade.serving.repository.preflight.verb import preflight as verb

    report = verb(repository, options)
    return Answer(report.to_dict(), render(report), json, exit_code=0 if report.passed else 1)


def build(
    artefact: Positional[Path],
    options: Annotated[BuildOptions, flat],
    json: bool = False,
) -> Answer:
    """Build a TensorRT engine of every variant, once its network has the promised types.

    Args:
        artefact: what `saccade export` wrote.
        json: machine-readable answer on standard output.
    """
    if options.locked:
        from saccade.export.runtimes.tensorrt.locked import rebuild
        from saccade.export.runtimes.tensorrt.locked import render as render_locked

        report = rebuild(artefact, options)
        code = 0 if report.identical else 1
        return Answer(report.to_dict(), render_locked(report), json, exit_code=code)
    from saccade.export.runtimes.build import build as verb

    built = verb(artefact, options)
    return Answer(built.to_dict(), built.table(), json)


def ops_table(found: dict[str, Any]) -> Any:
    """Ops with their attributes, then the implementations with version or reason."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    ops = Table("op", "inputs", "outputs", "attributes (default)", "tolerance by type")
    for op in found["ops"]:
        attributes = [f"{name}={each['default']}" for name, each in op["attributes"].items()]
        tolerance = [f"{dtype} {value:g}" for dtype, value in op["tolerance"].items()]
        cells = (
            op["name"],
            _ports(op["inputs"]),
            _ports(op["outputs"]),
            "\n".join(attributes) or "none",
            "\n".join(tolerance),
        )
        # As plain text: the brackets of the axes would be read as a style.
        ops.add_row(*map(Text, cells))
    ways = Table("", "implementation", "found, or what to do")
    for each in found["implementations"]:
        mark = "ok" if each["available"] else "-"
        ways.add_row(*map(Text, (mark, each["name"], each["detail"])))
    return Group(ops, ways)


def _ports(ports: dict[str, str]) -> str:
    return "\n".join(f"{name} [{axes}]" for name, axes in ports.items())
