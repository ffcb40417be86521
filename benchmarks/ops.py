# SPDX-License-Identifier: Apache-2.0
"""Compare the speed of the custom ops with their usual substitutes: one thread, interleaved.

Needs the peers: pip install entmax copt numba prox_tv (prox_tv needs Debian's liblapacke-dev).
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnx
import torch
from interleaved import Call, in_blocks, in_turn
from ops_peers import (
    Peer,
    exact_enough,
    largest,
    svd_power,
    svpn_iterated,
    tried_once,
    tv_peers,
)  # fmt: skip
from result_file import options_of, table, write_result

from saccade.exporter.runtimes.runners import onnx_session
from saccade.plugins import onnxruntime_library
from saccade.plugins.onnx_model import IR_VERSION, OPSET
from saccade.plugins.ops import OPS, sparsemax, svpn, svpn_fast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "plugins"))

from one_node import one_node_model

SPARSEMAX_SHAPES = ((256, 64), (256, 196), (64, 1024))
GRIDS = ((8, 20.0), (14, 20.0), (32, 10.0))
LAMBDAS = (0.01, 0.1)
MATRICES = ((14, 8.0), (24, 5.0), (38, 3.0))
# Inputs are rotated, so that no branch predictor learns one of them.
SETS = 8


@dataclass(frozen=True)
class Row:
    """One row of the table: the peer's time divided by ours should be at least `aim`."""

    what: str
    peer: str
    aim: float | None  # None: only reported
    ours_call: Call
    peer_call: Call
    notes: dict[str, Any] = field(default_factory=dict)


def normal(*shape: int, dtype: str = "float32") -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape).astype(dtype) for _ in range(SETS)]


def session(model: onnx.ModelProto, library: Path | None = None) -> Any:
    return onnx_session(model.SerializeToString(), kernels=library)


def softmax_model() -> onnx.ModelProto:
    helper = onnx.helper
    ports = [helper.make_tensor_value_info(name, 1, ["b", "n"]) for name in ("X", "Y")]
    node = helper.make_node("Softmax", ["X"], ["Y"], axis=-1)
    graph = helper.make_graph([node], "softmax", ports[:1], ports[1:])
    opset = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION)


def bound(held: Any, inputs: list[np.ndarray]) -> Call:
    """Return a session's run on bound memory, which excludes Python's overhead."""
    bindings = []
    first = held.get_inputs()[0].name
    for value in inputs:
        binding = held.io_binding()
        binding.bind_cpu_input(first, value)
        for output in held.get_outputs():
            binding.bind_output(output.name)
        bindings.append(binding)
    return lambda index: held.run_with_iobinding(bindings[index % SETS])


def run(held: Any, inputs: list[np.ndarray]) -> Call:
    """Return a session's run in the usual way."""
    (name,) = (value.name for value in held.get_inputs())
    return lambda index: held.run(None, {name: inputs[index % SETS]})


def sparsemax_rows() -> Iterator[Row]:
    import entmax

    axes = {"X": "b n", "Y": "b n"}
    bare = one_node_model(OPS["Sparsemax"], axes=axes, body=False)
    with_kernel = session(bare, onnxruntime_library())
    with_body = session(one_node_model(OPS["Sparsemax"], axes=axes))
    softmax = session(softmax_model())
    for shape in SPARSEMAX_SHAPES:
        inputs = normal(*shape)
        tensors = [torch.from_numpy(value) for value in inputs]
        kernel, plain = bound(with_kernel, inputs), bound(softmax, inputs)

        def peer(index: int, tensors: list[torch.Tensor] = tensors) -> Any:
            return entmax.sparsemax(tensors[index % SETS], dim=-1)

        what = f"Sparsemax in ONNX Runtime {shape}"
        yield Row(what, "Softmax of ONNX Runtime", 1 / 1.5, kernel, plain)
        yield Row(what, "entmax.sparsemax in torch", 25.0, kernel, peer)
        what = f"Sparsemax body {shape}"
        bodies = run(with_body, inputs), run(softmax, inputs)
        yield Row(what, "Softmax of ONNX Runtime", 1 / 9, *bodies)
        ours, theirs = (
            training(function, tensors)
            for function in (sparsemax, lambda z: entmax.sparsemax(z, dim=-1))
        )
        aim = None if shape == (256, 64) else 10.0
        what = f"sparsemax forward + backward in torch {shape}"
        yield Row(what, "entmax.sparsemax in torch", aim, ours, theirs)


def training(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Call:
    leaves = [tensor.clone().requires_grad_(True) for tensor in tensors]
    gradient = torch.from_numpy(normal(*tensors[0].shape)[3])

    def call(index: int) -> Any:
        leaf = leaves[index % SETS]
        return torch.autograd.grad(function(leaf), leaf, gradient)

    return call


def tvmax_rows() -> Iterator[Row]:
    for side, aim in GRIDS:
        grids = normal(64, side, side, dtype="float64")
        for lam in LAMBDAS:
            exact = [OPS["TVMax"].reference(grid, lam=lam)[0] for grid in grids]
            quick = tried_once(tv_peers(lam), grids[0])
            for dtype in ("float64", "float32"):
                # A peer may have the same error as our answer of that type.
                allowed = OPS["TVMax"].tolerance[dtype]
                peers = exact_enough(quick, grids, exact, allowed)
                yield tvmax_row(grids, lam, dtype, aim, exact, peers)


def tvmax_row(
    grids: list[np.ndarray],
    lam: float,
    dtype: str,
    aim: float,
    exact: list[np.ndarray],
    peers: dict[str, tuple[Peer, float]],
) -> Row:
    side = grids[0].shape[-1]
    axes = {"Z": f"b {side} {side}", "P": f"b {side} {side}", "error": "b"}
    model = one_node_model(OPS["TVMax"], dtype, {"lam": lam}, axes=axes, body=False)
    held, inputs = session(model, onnxruntime_library()), [grid.astype(dtype) for grid in grids]
    ours = bound(held, inputs)
    calls: dict[str, Call] = {
        name: lambda index, peer=peer: peer(grids[index % SETS])  # type: ignore[misc]
        for name, (peer, _) in peers.items()
    }
    times = {
        name: in_turn(ours, call, rounds=3, moment_s=0.0).peer_us for name, call in calls.items()
    }
    fastest = min(times, key=lambda name: times[name])
    answers = [held.run(None, {"Z": value}) for value in inputs]
    return Row(
        f"TVMax in ONNX Runtime, 64 grids {side} x {side}, lam {lam:g}, {dtype}",
        fastest,
        aim,
        ours,
        calls[fastest],
        {
            "our_error": max(largest(p, each) for (p, _), each in zip(answers, exact, strict=True)),
            "our_certified_error": max(float(bounds.max()) for _, bounds in answers),
            "peer_errors": {name: error for name, (_, error) in peers.items()},
            "peers_us": times,
        },
    )


def svpn_rows() -> Iterator[Row]:
    for side, aim in MATRICES:
        tensors = [torch.from_numpy(each) for each in normal(384, side, side)]
        start = torch.from_numpy(normal(side)[0])

        def exact(index: int, tensors: list[torch.Tensor] = tensors) -> Any:
            return svd_power(tensors[index % SETS])

        def fast(
            index: int, tensors: list[torch.Tensor] = tensors, start: torch.Tensor = start
        ) -> Any:
            return svpn_iterated(tensors[index % SETS], start)

        def ours(index: int, tensors: list[torch.Tensor] = tensors) -> Any:
            return svpn(tensors[index % SETS])

        def ours_fast(
            index: int, tensors: list[torch.Tensor] = tensors, start: torch.Tensor = start
        ) -> Any:
            return svpn_fast(tensors[index % SETS], start)

        shape = f"384 matrices {side} x {side}"
        yield Row(f"SvPN, {shape}", "torch.linalg.svd", aim, ours, exact)
        yield Row(f"SvPNFast (1,1), {shape}", "its form in torch", 3.0, ours_fast, fast)


def measured(row: Row, rounds: int, moment_s: float) -> dict[str, Any]:
    figures: dict[str, Any] = {"what": row.what, "peer": row.peer, "aim": row.aim, **row.notes}
    for way, measure in (("in_blocks", in_blocks), ("in_turn", in_turn)):
        ratio = measure(row.ours_call, row.peer_call, rounds=rounds, moment_s=moment_s)
        met = None if row.aim is None else bool(ratio.median >= row.aim)
        figures[way] = {"met": met, **ratio.to_dict()}
    return figures


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the table of docs/ops.md: times faster, or times as slow if the aim is below 1."""
    head = ["op and shape", "against", "aim", "in blocks (quartiles)", "in turn (quartiles)"]
    cells = []
    for row in rows:
        blocks, turn = row["in_blocks"], row["in_turn"]
        slow = row["aim"] is not None and row["aim"] < 1
        aim = "reported" if row["aim"] is None else f"{1 / row['aim'] if slow else row['aim']:.3g}"
        aim = f"at most {aim} x its time" if slow else aim
        times = f"{blocks['ours_us']:.3g} us, {blocks['peer_us']:.3g} us"
        ratios = [ratio(blocks, slow), ratio(turn, slow)]
        cells.append([row["what"], row["peer"], aim, *ratios, times])
    return table([*head, "ours, theirs in blocks"], cells)


def ratio(figures: dict[str, Any], slow: bool) -> str:
    """Return the median with its quartiles, and a note if the aim was missed."""
    numbers = [figures["peer_over_ours"], *figures["quartiles"]]
    low, middle, high = sorted(1 / number if slow else number for number in numbers)
    missed = " **missed**" if figures["met"] is False else ""
    return f"{middle:.3g} ({low:.3g} to {high:.3g}){missed}"


def main() -> None:
    parser = options_of(__doc__, "ops", rounds=15)
    parser.add_argument("--moment-s", type=float, default=0.05, help="length of a round")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    onnxruntime_library()
    rows = []
    for make in (sparsemax_rows, tvmax_rows, svpn_rows):
        for row in make():
            if options.only in row.what:
                rows.append(measured(row, options.rounds, options.moment_s))
                print(markdown(rows[-1:]).splitlines()[-1], flush=True)
    peers = ("torch", "onnxruntime", "entmax", "copt", "prox_tv")
    result = {
        "threads": 1,
        "versions": {name: metadata.version(name) for name in peers},
        "rows": rows,
    }
    write_result(options.out, result)
    print("\n" + markdown(rows))


if __name__ == "__main__":
    main()
