# SPDX-License-Identifier: Apache-2.0
"""Compare the CUDA kernels with torch on the same GPU and with the memory bandwidth.

`results/ops_gpu.json` names the device that was used.
    make -f plugins/native/tensorrt.mk cuda
    python benchmarks/ops_gpu.py [--check] [--library build/tensorrt/libsaccade_cuda.so]

Every kernel is first compared with its NumPy reference on new random inputs. A round then times
each function in turn, with events around a burst of calls on rotated inputs, so that all run at
the same clock rate. A burst is one CUDA graph, so that launching from Python is not part of the
time; torch.linalg.svd cannot be captured and is called directly. The figure is the median over the
rounds. The floor is the time that reading and writing the data takes at the bandwidth of a large
copy on the same device.
"""

import argparse
import ctypes
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ops_peers import svd_power, svpn_iterated
from result_file import RESULTS, write_result

from saccade.core.errors import SaccadeError, require
from saccade.plugins.ops import OPS

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "build" / "tensorrt" / "libsaccade_cuda.so"
RESULT = RESULTS / "ops_gpu.json"
BATCHES = (1, 64, 4096)
ROTATED, BURST, ROUNDS = 4, 20, 15
NOT_CAPTURED = "torch.linalg.svd"
# cuSOLVER takes matrices up to this side together, larger ones one after the other.
BATCHED_SVD_SIDE, SINGLE_SVDS = 32, 64
DTYPES = {"float32": 1, "float16": 10}


@dataclass(frozen=True)
class OpCase:
    """One op and the axes of an item; one call has a batch of 4,096 grids or matrices."""

    op: str
    item: tuple[int, ...]
    attributes: tuple[tuple[str, float], ...] = ()

    @property
    def label(self) -> str:
        given = ", ".join(f"{key} {value:g}" for key, value in self.attributes)
        return f"{self.op} {'x'.join(map(str, self.item))}{', ' + given if given else ''}"


CASES = (
    OpCase("Sparsemax", (64,)),
    OpCase("Sparsemax", (196,)),
    OpCase("Sparsemax", (1024,)),
    OpCase("TVMax", (8, 8), (("lam", 0.01),)),
    OpCase("TVMax", (14, 14), (("lam", 0.01),)),
    OpCase("TVMax", (14, 14), (("lam", 0.1),)),
    OpCase("TVMax", (32, 32), (("lam", 0.1),)),
    OpCase("SvPN", (14, 14)),
    OpCase("SvPN", (24, 24)),
    OpCase("SvPN", (38, 38)),
    OpCase("SvPNFast", (14, 14)),
    OpCase("SvPNFast", (38, 38)),
)


class Kernels:
    """The launch functions, for torch tensors on the current device and stream."""

    def __init__(self, path: Path, torch: Any) -> None:
        if not path.exists():
            raise SaccadeError(
                f"{path} does not exist. Build it with: make -f plugins/native/tensorrt.mk cuda"
            )
        self.library, self.torch = ctypes.CDLL(str(path)), torch
        for name in ("sparsemax", "tvmax", "svpn", "svpn_fast"):
            size = getattr(self.library, f"saccade_cuda_{name}_workspace_bytes")
            size.restype = ctypes.c_size_t

    def prepared(self, case: OpCase, x: Any, v0: Any) -> tuple[Callable[[], None], Any]:
        """Return a call on x that allocates nothing, and its output tensor."""
        torch, values = self.torch, OPS[case.op].defaults(dict(case.attributes))
        name = "svpn_fast" if case.op == "SvPNFast" else case.op.lower()
        axes = [len(x), *x.shape[1:]]
        size = getattr(self.library, f"saccade_cuda_{name}_workspace_bytes")
        workspace = torch.empty(
            max(16, size(*map(ctypes.c_int64, axes))), dtype=torch.uint8, device=x.device
        )
        y = torch.empty_like(x)
        error = torch.empty(len(x), dtype=torch.float32, device=x.device)
        before: list[Any] = [ctypes.c_int(DTYPES[str(x.dtype).removeprefix("torch.")]), pointer(x)]
        if case.op == "SvPNFast":
            before.append(pointer(v0))
        if case.op == "TVMax":
            before.append(None)
        before.append(pointer(y))
        if case.op == "TVMax":
            before.append(pointer(error))
        numbers = [
            ctypes.c_int64(value) if isinstance(value, int) else ctypes.c_float(value)
            for value in values.values()
        ]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        arguments = [*before, *map(ctypes.c_int64, axes), *numbers, pointer(workspace), stream]
        run = getattr(self.library, f"saccade_cuda_{name}")

        # `kept` keeps the tensors alive that the pointers refer to.
        def call(kept: tuple = (x, v0, y, error, workspace)) -> None:
            status = run(*arguments)
            assert status == 0, f"{case.label}: CUDA error {status}"

        return call, y


def pointer(tensor: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def sorted_sparsemax(torch: Any, z: Any) -> Any:
    """Sparsemax as usually written in torch, with a sort for the threshold."""
    top, _ = torch.sort(z, dim=-1, descending=True)
    excess = top.cumsum(-1) - 1
    rank = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    count = (rank * top > excess).sum(-1, keepdim=True)
    return (z - excess.gather(-1, count - 1) / count).clamp(min=0)


def svd_items(case: OpCase, batch: int) -> int:
    """Return how many matrices of a batch the SVD of torch gets: thousands may take seconds."""
    return batch if max(case.item) <= BATCHED_SVD_SIDE else min(batch, SINGLE_SVDS)


def peers(torch: Any, case: OpCase, x: Any, v0: Any) -> dict[str, Callable[[], Any]]:
    """Return the implementations that a kernel is compared with."""
    if case.op == "Sparsemax":
        return {
            "torch.softmax": lambda: torch.softmax(x, -1),
            "torch sort": lambda: sorted_sparsemax(torch, x.float()),
        }
    if case.op == "TVMax":
        return {"torch.softmax": lambda: torch.softmax(x.flatten(1), -1)}
    if case.op == "SvPN":
        # There is none for float16.
        return {NOT_CAPTURED: lambda: svd_power(x[: svd_items(case, len(x))].float())}
    return {"torch": lambda: svpn_iterated(x, v0)}


def inputs_of(torch: Any, case: OpCase, batch: int, dtype: str, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(batch, *case.item, generator=generator, device="cuda")
    v0 = torch.randn(case.item[-1], generator=generator, device="cuda")
    kind = getattr(torch, dtype)
    return x.to(kind), v0.to(kind)


def check(torch: Any, kernels: Kernels, case: OpCase, dtype: str, seed: int) -> float:
    """Return the largest difference from the reference over 5 items, relative to the tolerance."""
    op = OPS[case.op]
    x, v0 = inputs_of(torch, case, 5, dtype, seed)
    call, y = kernels.prepared(case, x, v0)
    call()
    torch.cuda.synchronize()
    arrays = [x.cpu().numpy()] + ([v0.cpu().numpy()] if case.op == "SvPNFast" else [])
    expected = op.reference(*arrays, **op.defaults(dict(case.attributes)))[0]
    away = np.abs(y.cpu().numpy().astype(np.float64) - expected) / op.scale(expected)
    return float(away.max()) / op.tolerance[dtype]


def copy_bandwidth(torch: Any) -> float:
    """Return the bytes per second, read plus written, of a large copy."""
    source = torch.empty(1 << 28, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    seconds = [timed(torch, lambda: target.copy_(source)) for _ in range(9)]
    return 2 * source.numel() * 4 / statistics.median(seconds[2:])


def burst_of(
    torch: Any, name: str, calls: list[Callable[[], Any]]
) -> tuple[Callable[[], Any], int]:
    """Return a function that makes a burst of calls on rotated inputs, and their number."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    if name == NOT_CAPTURED:
        return calls[0], 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for index in range(BURST):
            calls[index % len(calls)]()
    return graph.replay, BURST


def timed(torch: Any, call: Callable[[], Any]) -> float:
    """Return the seconds of one call on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def measure(
    torch: Any, kernels: Kernels, case: OpCase, batch: int, dtype: str, bandwidth: float
) -> dict[str, Any]:
    """Return the median microseconds of the kernel and its peers, interleaved, and the floor."""
    calls: dict[str, list[Callable[[], Any]]] = {}
    bytes_moved = 0
    for seed in range(ROTATED):
        x, v0 = inputs_of(torch, case, batch, dtype, seed)
        calls.setdefault("kernel", []).append(kernels.prepared(case, x, v0)[0])
        for name, call in peers(torch, case, x, v0).items():
            calls.setdefault(name, []).append(call)
        bytes_moved = 2 * x.numel() * x.element_size()
    by_name: dict[str, list[float]] = {name: [] for name in calls}
    bursts = {name: burst_of(torch, name, one_calls) for name, one_calls in calls.items()}
    for burst, _ in bursts.values():
        timed(torch, burst)
    for _ in range(ROUNDS):
        for name, (burst, count) in bursts.items():
            by_name[name].append(timed(torch, burst) / count * 1e6)
    medians = {name: statistics.median(times) for name, times in by_name.items()}
    quartiles = {name: statistics.quantiles(times, n=4)[::2] for name, times in by_name.items()}
    floor = bytes_moved / bandwidth * 1e6
    return {
        "subject": case.label, "batch": batch, "dtype": dtype, "median_us": medians,
        "quartiles_us": quartiles, "floor_us": floor, "of_floor": medians["kernel"] / floor,
        "items_of_torch.linalg.svd": svd_items(case, batch),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", type=Path, default=LIBRARY)
    parser.add_argument("--check", action="store_true", help="only compare with the reference")
    parser.add_argument("--seed", type=int, default=None, help="seed of the checked inputs")
    options = parser.parse_args()
    torch = require("torch", extra="export")
    if not torch.cuda.is_available():
        raise SaccadeError("torch sees no CUDA device here. Run this on a machine with a GPU.")
    kernels = Kernels(options.library, torch)
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    seed = (
        options.seed if options.seed is not None else int(np.random.SeedSequence().entropy) % 2**31
    )
    shares = {}
    for case in CASES:
        for dtype in DTYPES:
            share = shares[f"{case.label}, {dtype}"] = check(torch, kernels, case, dtype, seed)
            print(f"{case.label:32} {dtype}: {share:.3f} of the tolerance", file=sys.stderr)
            assert share <= 1, f"{case.label}, {dtype}, seed {seed}: wrong answer"
    if options.check:
        return 0
    write(torch, kernels, seed, shares)
    return 0


def write(torch: Any, kernels: Kernels, seed: int, shares: dict[str, float]) -> None:
    """Measure everything and write the results file, which names the device."""
    bandwidth = copy_bandwidth(torch)
    rows = [
        measure(torch, kernels, case, batch, dtype, bandwidth)
        for case in CASES
        for batch in BATCHES
        for dtype in DTYPES
    ]
    write_result(
        RESULT,
        {
            "device": torch.cuda.get_device_name(),
            "capability": list(torch.cuda.get_device_capability()),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "copy_bandwidth_gb_s": bandwidth / 1e9,
            "check": {"seed": seed, "share_of_tolerance": shares},
            "rounds": ROUNDS,
            "rows": rows,
        },
    )
    print(RESULT)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SaccadeError as error:
        sys.exit(str(error))
