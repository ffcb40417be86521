# SPDX-License-Identifier: Apache-2.0
"""Verbs for artefacts, repositories, servers and this machine."""

import shlex
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from saccade.core.errors import SaccadeError
from saccade.exporter.export import ExportOptions
from saccade.exporter.graph.samples import GateLevel
from saccade.exporter.group import GroupOptions
from saccade.exporter.policy.options import CalibrateOptions
from saccade.exporter.runtimes.runtime import BuildOptions, runtime_named
from saccade.serving.bench.options import BenchOptions, MeasureOptions, SweepOptions
from saccade.serving.bench.plan import PlanOptions
from saccade.serving.bench.sweep.choice import ChooseOptions
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.commands.command import Answer, Artefacts, Checkpoint, Repository, Result
from saccade.serving.commands.demo import DemoOptions
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.preflight.verb import PreflightOptions
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.envoy import ProxyOptions

Kernels = Annotated[bool, arg(help="run custom ops with saccade's kernels, or refuse")]


def export(checkpoint: Checkpoint, options: ExportOptions) -> Result:
    """Export a checkpoint to ONNX at several budgets, and verify each against the checkpoint.

    Examples:
        # export a shipped checkpoint at its family's budgets
        saccade export shipped:digits-sum --out build/digits-sum
        # export two budgets in two precisions
        saccade export my.safetensors --budget 1,0.5 --precision fp32,fp16 --out my
    """
    from saccade.exporter.export import export

    return export(checkpoint, options)


def group(
    members: Annotated[
        Positional[tuple[Path, ...]],
        arg(help="artefact folders, or word=folder to name their variants", help_behavior_hint=""),
    ],
    options: GroupOptions,
) -> Result:
    """Combine the variants of several checkpoints that do the same task in one artefact folder.

    Examples:
        # serve a small and a large model as budgets of one
        saccade group build/vit-s build/vit-b --out build/animals
        # name the variants in short
        saccade group s=build/vit-s-v2 b=build/vit-b-v2 --out build/animals
    """
    from saccade.exporter.group import group

    return group(members, options)


def verify(
    folder: Artefacts,
    bisect: Annotated[
        bool, arg(help="also name the first node of each variant's graph that differs")
    ] = False,
    gate: Annotated[
        GateLevel, arg(help="how much evidence: quick, standard, or thorough (320 samples)")
    ] = "standard",
) -> Result:
    """Run the parity gate on every variant of a folder; exit 1 if any fails.

    Examples:
        # check every exported file again
        saccade verify build/digits-sum
        # name the first node of each graph that differs
        saccade verify build/digits-sum --bisect
    """
    from saccade.exporter.gate.gate import verify

    report = verify(folder, gate)
    if not bisect:
        return report
    from rich.console import Group

    from saccade.exporter.gate.bisect import bisect as first_departures

    departures = first_departures(report)
    data = {**report.to_dict(), "bisect": departures.to_dict()["departures"]}
    text = Group(report.to_text(), "\n".join(row.to_text() for row in departures.rows))
    return Answer(data, text, report.exit_code)


def build(artefact: Artefacts, options: BuildOptions) -> Result:
    """Build a TensorRT engine for every variant, after checking the types in its network.

    Examples:
        # build an engine for every variant
        saccade build build/digits-sum
        # build for batches of 1 to 64, fastest at 16
        saccade build build/digits-sum --engine tensorrt-rtx --batch 1:16:64
    """
    from saccade.exporter.runtimes.runtime import build

    return build(artefact, options)


def bulk(artefact: Artefacts, options: BulkOptions) -> Result:
    """Answer every image in a folder, table or bucket once, and write a Parquet data set.

    Examples:
        # answer a folder of images
        saccade bulk build/digits-sum --input photos --out build/answers
        # embed the images of a table in four processes
        saccade bulk build/sparo --input a.parquet --ask embed --workers 4 --out out
    """
    from saccade.serving.bulk.bulk import bulk

    return bulk(artefact, options)


def bench(
    options: BenchOptions,
    folder: Annotated[
        Positional[Path | None], arg(help="artefact folder; frontier.json is written into it")
    ] = None,
    op_library: Kernels = False,
) -> Result:
    """Measure the score and throughput of each variant, in process and through a server.

    With --url instead of a folder, measure a server that is already running.

    Examples:
        # measure score and throughput of every variant
        saccade bench build/digits-sum --out build/report
        # measure a server that is already running
        saccade bench --url 127.0.0.1:8001 --out build/running
    """
    from saccade.serving.bench.bench import bench

    _check_kernels(options, op_library)
    return bench(folder, options)


def sweep(checkpoint: Checkpoint, options: SweepOptions, op_library: Kernels = False) -> Result:
    """Export and measure several budgets and precisions; resume where an earlier run stopped.

    A point that fails is listed in the report with its reason, and the exit code is 1.

    Examples:
        # export and measure three budgets
        saccade sweep shipped:digits-sum --budget 1,0.5,0.25 --out build/sweep
        # retry the points that failed
        saccade sweep shipped:digits-sum --budget 1,0.5,0.25 --retry --out build/sweep
    """
    from saccade.serving.bench.sweep.sweep import sweep

    _check_kernels(options, op_library)
    return sweep(checkpoint, options)


def choose(
    folder: Annotated[
        Positional[Path],
        arg(help="folder of `saccade sweep`, or an artefact folder with a frontier.json"),
    ],
    options: ChooseOptions,
) -> Result:
    """Show which variant the router chooses for a budget, a score or a latency, and why.

    Examples:
        # find the fastest variant that scores at least 92 %
        saccade choose build/digits-sum --min-score 0.92
        # find the best variant whose p95 with 4 callers is at most 50 ms
        saccade choose build/digits-sum --max-latency-ms 50 --concurrency 4
    """
    from saccade.serving.bench.sweep.choice import choose

    return choose(folder, options)


def calibrate(
    folder: Annotated[Positional[Path], arg(help="artefact folder, measured with `saccade bench`")],
    options: CalibrateOptions,
) -> Result:
    """Certify chains of variants in which easy samples stop early, and write them as policies.

    Exit 1 if the data does not certify one of the risks.

    Examples:
        # answer easy images with less compute and lose at most 1 % of the answers
        saccade calibrate build/digits-sum --data digits-sum
        # certify two policies, both chosen on the validation images
        saccade calibrate build/digits-sum --risk 0.005,0.02 --choose-split validation
    """
    from saccade.exporter.evaluation.calibrate import calibrate

    return calibrate(folder, options)


def plan(
    folder: Annotated[
        Positional[Path],
        arg(help="artefact folder or sweep that was measured on the kind of machine to plan for"),
    ],
    options: PlanOptions,
) -> Result:
    """Print the replicas, cores and budgets that a load needs, with the arithmetic.

    The exit code is 1 if no measured variant answers within the SLO.

    Examples:
        # compute the replicas for 500 requests per second
        saccade plan build/digits-sum --rps 500 --slo-ms 20
        # keep one replica in reserve
        saccade plan build/digits-sum --rps 500 --slo-ms 20 --spare 1
    """
    from saccade.serving.bench.plan import plan

    return plan(folder, options)


def repository(
    folder: Annotated[
        Positional[Path], arg(help="artefact folder, ideally measured with `saccade bench`")
    ],
    options: RepositoryOptions,
    op_library: Kernels = False,
) -> Result:
    """Write a model repository for NVIDIA's Triton Inference Server.

    Examples:
        # write the folder that a server loads
        saccade repository build/digits-sum --out build/repository
        # limit the queue to 64 requests
        saccade repository build/digits-sum --max-queue 64 --out build/repository
    """
    from saccade.serving.repository.deploy import deploy

    _check_kernels(options, op_library)
    deployment = deploy(folder, options)
    # Plans and GPU instances need the container: the bundled server runs neither. Otherwise, the
    # closing names the next command.
    serve = f"saccade serve {shlex.quote(str(deployment.folder))} --print-command --container"
    how = f"\nServe it with: {serve}" if options.on_gpu else ""
    ops = f" Custom ops are run by {deployment.ops}." if deployment.ops else ""
    ops += f" Policies: {', '.join(deployment.policies)}." if deployment.policies else ""
    text = (
        f"{deployment.folder}: router {deployment.model} for {', '.join(deployment.variants)}."
        f"{ops}{how}"
    )
    return Answer(deployment.to_dict(), text)


def preflight(repository: Repository, options: PreflightOptions) -> Result:
    """Check a repository before a server loads it; exit 1 if a check fails.

    Examples:
        # check a repository before it is deployed
        saccade preflight build/repository
        # check that it fits into 2 GiB of memory
        saccade preflight build/repository --memory-mib 2048
    """
    from saccade.serving.repository.preflight.verb import preflight

    return preflight(repository, options)


def serve(
    repository: Repository,
    options: ServeOptions,
    print_command: Annotated[
        bool, arg(help="print a command that serves it without supervision, and exit")
    ] = False,
    container: Annotated[
        bool, arg(help="with --print-command: print the command for NVIDIA's container")
    ] = False,
) -> Result:
    """Serve a repository in the foreground under supervision, until Ctrl-C.

    Examples:
        # serve over gRPC on this machine
        saccade serve build/repository
        # print the command for NVIDIA's container instead
        saccade serve build/repository --print-command --container
    """
    from saccade.serving.server import serve as verb

    if print_command:
        words = verb.print_command(repository, options, container=container)
        return Answer({"command": list(words)}, verb.as_text(words))
    if container:
        raise SaccadeError(
            "--container: found it alone, expected it with --print-command. `saccade serve` "
            "starts only the bundled server. Add --print-command to get the container's command."
        )
    return Answer({"stopped": str(repository)}, exit_code=verb.serve(repository, options))


def proxy(
    servers: Annotated[
        Positional[tuple[str, ...]],
        arg(help="gRPC addresses of the servers, HOST:PORT[,HOST:PORT...]"),
    ],
    options: ProxyOptions,
) -> Result:
    """Write the configuration of an Envoy proxy for one or more servers.

    Examples:
        # put two servers behind one address
        saccade proxy 127.0.0.1:8001,127.0.0.1:8101 --out build/envoy.yaml
        # listen on another port
        saccade proxy 127.0.0.1:8001 --listen 127.0.0.1:9001 --out build/envoy.yaml
    """
    from saccade.serving.server.envoy import proxy

    return proxy(servers, options)


def demo(options: DemoOptions) -> Result:
    """Run the whole workflow on real digits: train, export, verify, serve, classify, measure.

    Examples:
        # train, export, verify, serve, classify and measure
        saccade demo
        # write to another folder
        saccade demo --out my-demo
    """
    from saccade.serving.commands.demo import demo

    return Answer(*demo(options))


def inspect(
    path: Annotated[
        Positional[Path],
        arg(help="a file or folder written by saccade, a foreign checkpoint, or shipped:NAME"),
    ],
) -> Result:
    """Show what a file or folder is, and which command to run on it.

    Examples:
        # show what a file is, and what to do with it
        saccade inspect shipped:digits-sum
        # find the converter for a checkpoint from elsewhere
        saccade inspect epoch_32.pt
    """
    from saccade.serving.commands.inspection import inspect

    return inspect(path)


def ops(
    build: Annotated[
        bool, arg(help="first build the library for ONNX Runtime and torch, if needed")
    ] = False,
) -> Result:
    """List the custom ops, their attributes, and the implementations that can run here.

    Examples:
        # list the custom ops and what can run them here
        saccade ops
        # build their kernels first
        saccade ops --build
    """
    from saccade.plugins import onnxruntime_library
    from saccade.plugins.availability import describe

    if build:
        onnxruntime_library()
    description = describe()
    return Answer(description, ops_table(description))


def doctor(
    url: Annotated[
        str | None,
        arg(help="also check that every variant of the server at this gRPC address answers"),
    ] = None,
) -> Result:
    """List what is installed, what is missing for each use, and how to install it.

    Examples:
        # list what is installed, and what is missing for each use
        saccade doctor
        # check that every variant of a running server answers
        saccade doctor --url 127.0.0.1:8001
    """
    from saccade.serving.commands.doctor import doctor

    return doctor(url)


def _check_kernels(options: MeasureOptions | RepositoryOptions, asked: bool) -> None:
    """Check that kernels exist if `--op-library` requires them; without it they are optional.

    Raises: SaccadeError if they are required and missing.
    """
    if not asked:
        return
    if not options.op_library:
        raise SaccadeError(
            "Found both --op-library and --no-op-library, expected at most one. Drop one of them."
        )
    if not (runtime := runtime_named(options.runtime)).has_kernels():
        raise SaccadeError(
            f"--op-library: {runtime.title} has no kernels for the custom ops here. Build them "
            "with `saccade ops --build`, or drop the option to run the ops' function bodies."
        )


def ops_table(description: dict[str, Any]) -> Any:
    """Return a table of ops and one of implementations, each with its version or a reason."""
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
        # As plain text: rich would read the brackets of the axes as a style.
        ops.add_row(*map(Text, cells))
    ways = Table("", "implementation", "found, or what to do")
    for implementation in description["implementations"]:
        mark = "ok" if implementation["available"] else "-"
        ways.add_row(*map(Text, (mark, implementation["name"], implementation["detail"])))
    return Group(ops, ways)


def _ports(ports: dict[str, str]) -> str:
    return "\n".join(f"{name} [{axes}]" for name, axes in ports.items())
