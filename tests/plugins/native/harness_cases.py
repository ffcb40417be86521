# SPDX-License-Identifier: Apache-2.0
"""Writes the conformance cases as raw files for the plugin harness, and runs it.

python tests/plugins/native/harness_cases.py HARNESS LIBRARY [--no-gpu] [--registry LIBRARY]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from saccade.plugins.contract import Op
from saccade.plugins.ops import OPS
from saccade.plugins.tvmax.contract import SMALLEST_FLOAT32_TOLERANCE

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ops_cases import CASES, Case, normal

# Items that do not fit into a block's shared memory, and rows longer than a warp holds.
LARGE = {
    "Sparsemax": {
        "2,000": Case((normal(3, 2000, seed=50),)),
        "30,001": Case((normal(2, 30001, seed=51),)),
    },
    "TVMax": {"48 x 40": Case((normal(3, 48, 40, seed=52, scale=0.5),), {"lam": 0.05})},
    "SvPN": {"128 x 96": Case((normal(2, 128, 96, seed=53),))},
    "SvPNFast": {"128 x 96": Case((normal(2, 128, 96, seed=54), normal(96, seed=55)))},
}


def allowed_difference(op: Op, port: int, expected: np.ndarray, dtype: str) -> np.ndarray:
    """Allowed difference of each element from the reference; an error only has to be small."""
    if op.outputs[port].dtype != "T":
        return np.full(expected.shape, SMALLEST_FLOAT32_TOLERANCE)
    known = np.nan_to_num(expected)
    return np.broadcast_to(op.tolerance[dtype] * op.scale(known), expected.shape)


def write_case(folder: Path, op: Op, name: str, case: Case, dtype: str) -> list[str]:
    """The lines of cases.txt for one case; its tensors go to files of the folder."""
    label = f"{name}-{dtype}".replace(" ", "_").replace(",", "")
    lines = [f"case {op.node} {label}"]
    for key, value in case.attributes.items():
        kind = "int" if op.attributes[key].kind is int else "float"
        lines.append(f"field {key} {kind} {value!r}")
    arrays = [
        np.asarray(array, dtype if port.dtype == "T" else port.dtype)
        for array, port in zip(case.inputs, op.inputs, strict=True)
    ]
    expected = op.reference(*arrays, **op.defaults(case.attributes))
    stem = f"{op.node}-{len(list(folder.iterdir()))}"
    for index, array in enumerate(arrays):
        (folder / f"{stem}-in{index}").write_bytes(np.ascontiguousarray(array).tobytes())
        axes = " ".join(map(str, array.shape))
        lines.append(f"input {array.dtype.name} {axes} : {stem}-in{index}")
    for index, array in enumerate(expected):
        kind = dtype if op.outputs[index].dtype == "T" else op.outputs[index].dtype
        limit = allowed_difference(op, index, array, dtype)
        wanted = array if op.outputs[index].dtype == "T" else np.where(np.isnan(array), array, 0)
        for word, values in (("expected", wanted), ("allowed", limit)):
            data = np.ascontiguousarray(values, np.float64)
            (folder / f"{stem}-{word}{index}").write_bytes(data.tobytes())
        axes = " ".join(map(str, array.shape))
        lines.append(f"output {kind} {axes} : {stem}-expected{index} {stem}-allowed{index}")
    return [*lines, "end"]


def write_cases(folder: Path, large: bool = True) -> int:
    """Fills the folder; the number of cases."""
    lines: list[str] = []
    for node, op in OPS.items():
        cases = {**CASES[node], **(LARGE.get(node, {}) if large else {})}
        for name, case in cases.items():
            for dtype in case.dtypes:
                if dtype != "float64":
                    lines += write_case(folder, op, name, case, dtype)
    (folder / "cases.txt").write_text("\n".join(lines) + "\n")
    return lines.count("end")


def main(harness: str, library: str, *options: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        write_cases(Path(folder), large="--no-gpu" not in options)
        return subprocess.run([harness, library, folder, *options]).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
