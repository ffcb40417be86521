# SPDX-License-Identifier: Apache-2.0
"""Verbs on artefacts, repositories, servers and this machine."""

import shlex
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from saccade.errors import SaccadeError
from saccade.exporter.exported import ExportOptions
from saccade.exporter.policy.options import CalibrateOptions
from saccade.exporter.runtimes.options import BuildOptions
from saccade.exporter.runtimes.runtime import runtime_named
from saccade.serving.bench.options import BenchOptions, MeasureOptions
from saccade.serving.bench.plan import PlanOptions
from saccade.serving.bench.sweep.choice import ChooseOptions
from saccade.serving.bench.sweep.options import SweepOptions
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.commands.command import Answer, Artefacts, Checkpoint, Repository, Result
from saccade.serving.commands.demo import DemoOptions
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.verb import PreflightOptions
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.envoy import ProxyOptions

Kernels = Annotated[bool, arg(help="refuse to run custom ops by anything but our kernels.")]


def export(checkpoint: Checkpoint, options: ExportOptions) -> Result:
    """Export a checkpoint to ONNX at several budgets, each proved against the checkpoint."""
    from saccade.exporter.exported import export

    return export(checkpoint, options)


def verify(
    folder: Artefacts,
    bisect: Annotated[
        bool, arg(help="also name the first node of each variant's graph that departs.")
    ] = False,
) -> Result:
    """Run the parity gate on every variant of a folder; exit 1 if any fails."""
    from saccade.exporter.gate.gate import verify

    report = verify(folder)
    if not bisect:
        return report
    from rich.console import Group

    from saccade.exporter.gate.bisect import bisect as first_departures

    departures = first_departures(report)
    data = {**report.to_dict(), "bisect": departures.to_dict()["departures"]}
    text = Group(report.to_text(), "\n".join(row.to_text() for row in departures.rows))
    return Answer(data, text, report.exit_code)


def build(artefact: Artefacts, options: BuildOptions) -> Result:
    """Build a TensorRT engine of every variant, once its network has the expected types."""
    if options.locked:
        from saccade.exporter.runtimes.tensorrt.locked import rebuild

        return rebuild(artefact, options)
    from saccade.exporter.runtimes.build import build

    return build(artefact, options)


def bulk(artefact: Artefacts, options: BulkOptions) -> Result:
    """Answer every image of a folder, table or bucket once, into a Parquet data set."""
    from saccade.serving.bulk.bulk import bulk

    return bulk(artefact, options)


def bench(
    options: BenchOptions,
    folder: Annotated[
        Positional[Path | None],
        arg(help="what `saccade export` wrote; frontier.json is written into it."),
    ] = None,
    op_library: Kernels = False,
) -> Result:
    """Measure score and throughput of each variant, in process and through a server.

    With --url in place of a folder, those of a server that runs already.
    """
    from saccade.serving.bench.bench import bench

    _check_kernels(options, op_library)
    return bench(folder, options)


def sweep(checkpoint: Checkpoint, options: SweepOptions, op_library: Kernels = False) -> Result:
    """Export and measure budgets and precisions of a checkpoint; goes on where it was stopped.

    A point that fails stands in the report with its reason, and makes the exit code 1.
    """
    from saccade.serving.bench.sweep.sweep import sweep

    _check_kernels(options, op_library)
    return sweep(checkpoint, options)


def choose(
    folder: Annotated[
        Positional[Path],
        arg(help="what `saccade sweep` wrote, or an artefact folder with its frontier.json."),
    ],
    options: ChooseOptions,
) -> Result:
    """Choose the variant that the router takes for a budget, a score or a latency, and say why."""
    from saccade.serving.bench.sweep.choice import choose

    return choose(folder, options)


def calibrate(
    folder: Annotated[
        Positional[Path], arg(help="what `saccade export` wrote and `saccade bench` measured.")
    ],
    options: CalibrateOptions,
) -> Result:
    """Certify chains of variants in which easy samples stop early, and write them as policies.

    Exit 1 if the data does not certify one of the risks.
    """
    from saccade.exporter.evaluation.calibrate import calibrate

    return calibrate(folder, options)


def plan(
    folder: Annotated[
        Positional[Path],
        arg(help="what `saccade bench` or `saccade sweep` measured on the machine planned with."),
    ],
    options: PlanOptions,
) -> Result:
    """Print replicas, cores and budgets that a load needs, with the arithmetic.

    Exit 1 if nothing that was measured answers within the SLO.
    """
    from saccade.serving.bench.plan import plan

    return plan(folder, options)


def repository(
    folder: Annotated[
        Positional[Path], arg(help="what `saccade export` wrote, best after `saccade bench`.")
    ],
    options: RepositoryOptions,
    op_library: Kernels = False,
) -> Result:
    """Write the model repository that a Triton server loads."""
    from saccade.serving.repository.deploy import deploy

    _check_kernels(options, op_library)
    deployment = deploy(folder, options)
    # Plans and GPU instances are for the container: the bundled server runs neither.
    how = " --print-command --container" if options.on_gpu else ""
    ops = f" Custom ops run by {deployment.ops}." if deployment.ops else ""
    ops += f" Policies: {', '.join(deployment.policies)}." if deployment.policies else ""
    text = (
        f"{deployment.folder}: router {deployment.model} before {', '.join(deployment.variants)}."
        f"{ops}\nServe it with: saccade serve {shlex.quote(str(deployment.folder))}{how}"
    )
    return Answer(deployment.to_dict(), text)


def preflight(repository: Repository, options: PreflightOptions) -> Result:
    """Check a repository for what would make the server fail late; exit 1 if anything would."""
    from saccade.serving.repository.preflight.verb import preflight

    return preflight(repository, options)


def serve(
    repository: Repository,
    options: ServeOptions,
    print_command: Annotated[
        bool,
        arg(help="start nothing; print the command that serves it without supervision."),
    ] = False,
    container: Annotated[
        bool, arg(help="with --print-command, the command for NVIDIA's container.")
    ] = False,
) -> Result:
    """Start the server in the foreground and watch over it; Ctrl-C stops it."""
    from saccade.serving.server.server import serve

    if print_command:
        from saccade.serving.server import print_command as printed

        words = printed.print_command(repository, options, container=container)
        return Answer({"command": list(words)}, printed.as_text(words))
    if container:
        raise SaccadeError(
            "--container: saccade serve starts the embedded server only. "
            "Add --print-command for the container's command."
        )
    return Answer({"stopped": str(repository)}, exit_code=serve(repository, options))


def proxy(
    servers: Annotated[
        Positional[tuple[str, ...]],
        arg(help="addresses of the servers' gRPC, HOST:PORT[,HOST:PORT...]."),
    ],
    options: ProxyOptions,
) -> Result:
    """Write the configuration of an Envoy proxy in front of one or several servers."""
    from saccade.serving.server.envoy import proxy

    return proxy(servers, options)


def demo(options: DemoOptions) -> Result:
    """Run the whole path on real digits: train, export, verify, serve, classify, benchmark."""
    from saccade.serving.commands.demo import demo

    return Answer(*demo(options))


def inspect(
    path: Annotated[
        Positional[Path],
        arg(help="any file or folder of saccade, a checkpoint of others, or shipped:NAME."),
    ],
) -> Result:
    """Tell what a file or folder is, and which command fits it."""
    from saccade.serving.commands.inspection import inspect

    return inspect(path)


def ops(
    build: Annotated[
        bool,
        arg(help="first build the library for ONNX Runtime and torch, if it is not built yet."),
    ] = False,
) -> Result:
    """The custom ops, their attributes, and which implementations can run here."""
    from saccade.plugins import onnxruntime_library
    from saccade.plugins.availability import describe

    if build:
        onnxruntime_library()
    description = describe()
    return Answer(description, ops_table(description))


def doctor(
    url: Annotated[
        str | None,
        arg(help="also ask the server at this gRPC address whether every variant answers."),
    ] = None,
) -> Result:
    """List what is installed, what is missing for which use, and how to get it."""
    from saccade.serving.commands.doctor import doctor

    return doctor(url)


def _check_kernels(options: MeasureOptions | RepositoryOptions, asked: bool) -> None:
    """Check of kernels: who asks for them gets them; who does not ask gets them where there are
    some.

    Raises: SaccadeError if they were asked for and are not here.
    """
    if not asked:
        return
    if not options.op_library:
        raise SaccadeError(
            "--op-library and --no-op-library contradict each other. Give one of them."
        )
    if not (runtime := runtime_named(options.runtime)).has_kernels():
        raise SaccadeError(
            f"--op-library: {runtime.title} has no kernels of custom ops here. Build them with: "
            "saccade ops --build, or leave the option out to run their function bodies."
        )


def ops_table(description: dict[str, Any]) -> Any:
    """Ops with their attributes, then the implementations with version or reason."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    ops = Table("op", "inputs", "outputs", "attributes (default)", "tolerance by type")
    for op in description["ops"]:
        attributes = [
            f"{name}={attribute['default']}" for name, attribute in op["attributes"].items()
        ]
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
    for implementation in description["implementations"]:
        mark = "ok" if implementation["available"] else "-"
        ways.add_row(*map(Text, (mark, implementation["name"], implementation["detail"])))
    return Group(ops, ways)


def _ports(ports: dict[str, str]) -> str:
    return "\n".join(f"{name} [{axes}]" for name, axes in ports.items())
