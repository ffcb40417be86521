# SPDX-License-Identifier: Apache-2.0
"""Check in which runtimes the function bodies of the custom ops give the right answer.

Every case of the tests (tests/plugins/ops_cases.py) is run as a file without functions, as written
by `saccade export --inline-ops`, and compared with the float64 reference:

    python benchmarks/ops_runtimes.py [--node-modules DIR] [--only RUNTIME]

Install OpenVINO with `pip install openvino`, or into a folder on PYTHONPATH (`pip install --no-deps
--target FOLDER openvino openvino-telemetry`). Install onnxruntime-node and onnxruntime-web in DIR
(`npm install --ignore-scripts onnxruntime-node onnxruntime-web`); they need node. TensorRT-RTX only
builds engines, because running them would need a GPU.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnx
import onnxruntime
from ops_in_node import node
from result_file import write_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "plugins"))

from one_node import one_node_model
from ops_cases import CASES, Case

from saccade.core.machine import this_machine
from saccade.exporter.graph.precision import inlined
from saccade.plugins import onnxruntime_library
from saccade.plugins.contract import Op
from saccade.plugins.ops import OPS

DTYPES = ("float32", "float16", "float64")
NODE = ("onnxruntime-node", "onnxruntime-web")


@dataclass(frozen=True)
class Job:
    """One case of an op in one type, with the reference's answer."""

    op: Op
    case: str
    dtype: str
    given: Case

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.given.arrays(self.dtype)

    def model(self, *, functions: bool = False, fixed: bool = False) -> onnx.ModelProto:
        """Return a model of only its node; sizes except the batch are known only if `fixed`."""
        axes = {
            port.name: " ".join(
                str(size) if fixed and (i or array.ndim == 1) else f"{port.name.lower()}_{i}"
                for i, size in enumerate(array.shape)
            )
            for port, array in zip(self.op.inputs, self.arrays, strict=True)
        }
        proto = one_node_model(self.op, self.dtype, self.given.attributes, axes=axes)
        return proto if functions else inlined(proto)

    def distance(self, actual: Sequence[np.ndarray]) -> float:
        """Return the largest difference on the op's scale; infinite if only one side is NaN."""
        attributes = self.op.defaults(self.given.attributes)
        in_file = {
            name: float(np.float32(value)) if isinstance(value, float) else value
            for name, value in attributes.items()
        }
        expected = self.op.reference(*self.arrays, **in_file)[0]
        if actual[0].shape != expected.shape:
            return float("inf")
        if expected.size == 0:
            return 0.0
        answer = np.asarray(actual[0], np.float64)
        if (np.isnan(answer) != np.isnan(expected)).any():
            return float("inf")
        known = np.where(np.isnan(expected), 0, expected)
        return float(np.max(np.abs(np.nan_to_num(answer) - known) / self.op.scale(known)))

    @property
    def allowed(self) -> float:
        """The tolerance of float32, in which bodies compute for every type."""
        return self.op.tolerance["float32" if self.dtype == "float64" else self.dtype]


def jobs() -> list[Job]:
    return [
        Job(OPS[name], case, dtype, given)
        for name, cases in CASES.items()
        for case, given in cases.items()
        for dtype in DTYPES
        if dtype in given.dtypes
    ]


Answer = Sequence[np.ndarray] | Exception | None  # None: built, not run
Run = Callable[[Sequence[Job]], tuple[str, Iterator[Answer]]]


def each(version: str, run: Callable[[Job], Answer], asked: Sequence[Job]) -> Any:
    def answers() -> Iterator[Answer]:
        for job in asked:
            try:
                yield run(job)
            except Exception as error:  # the runtime's error is the result
                yield error

    return version, answers()


def session(model: onnx.ModelProto, library: Path | None = None) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    if library is not None:
        options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def feeds(job: Job) -> dict[str, np.ndarray]:
    return dict(zip((port.name for port in job.op.inputs), job.arrays, strict=True))


def onnxruntime_kernel(asked: Sequence[Job]) -> Any:
    library = onnxruntime_library()
    return each(
        onnxruntime.__version__,
        lambda job: session(job.model(functions=True), library).run(None, feeds(job)),
        asked,
    )


def onnxruntime_function(asked: Sequence[Job]) -> Any:
    return each(
        onnxruntime.__version__,
        lambda job: session(job.model(functions=True)).run(None, feeds(job)),
        asked,
    )


def onnxruntime_inlined(asked: Sequence[Job]) -> Any:
    run = lambda job: session(job.model()).run(None, feeds(job))  # noqa: E731
    return each(onnxruntime.__version__, run, asked)


def onnx_reference(asked: Sequence[Job]) -> Any:
    from onnx.reference import ReferenceEvaluator

    def run(job: Job) -> Any:
        with np.errstate(all="ignore"):
            return ReferenceEvaluator(job.model()).run(None, feeds(job))

    return each(onnx.__version__, run, asked)


def openvino(asked: Sequence[Job]) -> Any:
    # Importing it would write an identity into the home folder.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    core = openvino.Core()
    # Without this, a CPU with AMX computes in bfloat16.
    exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}

    def run(job: Job) -> Any:
        model = core.read_model(job.model().SerializeToString())
        answers = core.compile_model(model, "CPU", exact)(job.arrays)
        return [np.array(answers[index]) for index in range(len(job.op.outputs))]

    return each(openvino.__version__.split("-")[0], run, asked)


def tensorrt_rtx(asked: Sequence[Job]) -> Any:
    from rtx_builds import build

    def run(job: Job) -> None:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "op.onnx"
            onnx.save(job.model(fixed=True), path)
            build(path)

    # A build takes a second and does not depend on the data: one for each op and type.
    first = {(job.op.node, job.dtype): job for job in reversed(asked) if job.arrays[0].ndim > 2}
    chosen = [job for job in asked if job is first.get((job.op.node, job.dtype))]
    asked_for = [job if job in chosen and job.dtype != "float64" else None for job in asked]
    version = metadata.version("tensorrt-rtx-cu13")
    return version, (None if job is None else _tried(run, job) for job in asked_for)


def _tried(run: Callable[[Job], Any], job: Job) -> Any:
    try:
        run(job)
    except Exception as error:
        return error
    return ()


def measured(run: Run, asked: Sequence[Job]) -> dict[str, Any]:
    """Return by op and type the cases, the largest error of agreeing ones, and differing ones."""
    version, answers = run(asked)
    rows: dict[str, dict[str, Any]] = {}
    for job, answer in zip(asked, answers, strict=True):
        if answer is None:
            continue
        by_type = rows.setdefault(job.op.node, {})
        row = by_type.setdefault(job.dtype, {"cases": 0, "largest_error": 0.0, "differ": {}})
        row["cases"] += 1
        if isinstance(answer, Exception):
            row["differ"][job.case] = " ".join(str(answer).split())[:200]
        elif len(answer):
            away = job.distance(answer)
            if away <= job.allowed:
                row["largest_error"] = max(row["largest_error"], away)
            else:
                row["differ"][job.case] = away if np.isfinite(away) else "NaN on one side only"
        else:
            row["largest_error"] = None  # built
    return {"version": version, "ops": rows}


def markdown(runtimes: dict[str, Any]) -> str:
    """Return a row per runtime: the largest error in float32 and float16, or what was found."""
    lines = [f"| runtime | {' | '.join(OPS)} |", "|---" * (len(OPS) + 1) + "|"]
    for name, runtime in runtimes.items():
        cells = []
        for op in OPS:
            rows = [runtime["ops"][op].get(dtype) for dtype in ("float32", "float16")]
            texts = [text(row) for row in rows if row]
            cells.append(texts[0] if len(set(texts)) == 1 else ", ".join(texts))
        lines.append(f"| {name} {runtime['version']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def text(row: dict[str, Any]) -> str:
    if row["differ"]:
        return f"{len(row['differ'])} of {row['cases']} differ"
    return "builds" if row["largest_error"] is None else f"{row['largest_error']:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--node-modules", type=Path, help="folder in which npm installed both runtimes"
    )
    parser.add_argument("--only", default="", help="only runtimes whose name contains this")
    out = Path(__file__).parent / "results" / "ops_runtimes.json"
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    runtimes: dict[str, Run] = {
        "ONNX Runtime, kernels": onnxruntime_kernel,
        "ONNX Runtime, functions": onnxruntime_function,
        "ONNX Runtime, inlined": onnxruntime_inlined,
        "onnx reference evaluator": onnx_reference,
        "OpenVINO": openvino,
        "TensorRT-RTX, built": tensorrt_rtx,
    }
    if options.node_modules:
        runtimes |= {name: node(name, options.node_modules.resolve()) for name in NODE}
    held = json.loads(options.out.read_text())["runtimes"] if options.out.exists() else {}
    for name, run in runtimes.items():
        if options.only in name:
            held[name] = measured(run, jobs())
            print(name, json.dumps(held[name]), flush=True)
    versions = {"onnx": onnx.__version__, "python": platform.python_version()}
    result = {"machine": asdict(this_machine()), "versions": versions, "runtimes": held}
    write_result(options.out, result)
    print(markdown(held))


if __name__ == "__main__":
    main()
