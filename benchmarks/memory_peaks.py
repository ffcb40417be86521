# SPDX-License-Identifier: Apache-2.0
"""Measure the largest resident memory of convert and export, beside the estimates that refuse.

    python benchmarks/real_models.py vit-b vit-h --out build/real
    python benchmarks/memory_peaks.py build/real/vit-b build/real/vit-h --precision fp32 int8

Each step runs in its own process. Its peak is that of the process, with the files that it maps.
Rows of models that were not named are kept.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from result_file import write_result

from saccade.core.machine import this_machine
from saccade.core.resources import EXPORT, convert_peak
from saccade.models.checkpoint import weights_bytes

RESULTS = Path(__file__).parent / "results" / "memory_peaks.json"
_MIB = 2**20


def measured(command: Sequence[str]) -> dict[str, Any]:
    """Run a command of saccade, and return its time and its peak.

    Units: MiB, s.
    """
    script = [sys.executable, __file__, "--child", *command]
    started = time.perf_counter()
    done = subprocess.run(script, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        return {"seconds": seconds, "failed": done.stderr.strip()[-300:]}
    return {"seconds": seconds, "peak_mib": int(done.stdout.splitlines()[-1])}


def child(command: Sequence[str]) -> int:
    """Run the command as the only child of this process, and print the child's peak in MiB."""
    done = subprocess.run([sys.executable, "-m", "saccade", *command], stdout=subprocess.DEVNULL)
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
    return done.returncode


def rows(model: Path, precisions: Sequence[str], images: str | None) -> Iterator[dict[str, Any]]:
    """Yield a row for the conversion of a folder, and for its export in each precision."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, out = Path(folder) / f"{model.name}.safetensors", Path(folder) / "out"
        on = ["--calibrate-on", images] if images else []
        row = measured(["convert", str(model), "--out", str(checkpoint), *on])
        if "failed" in row:
            yield {"model": model.name, "step": "convert", **row}
            return
        weights = weights_bytes(checkpoint)
        sizes = {"model": model.name, "weights_mib": weights // _MIB}
        files = [*model.glob("*.safetensors"), *model.glob("*.bin")]
        stored = sum(file.stat().st_size for file in files)
        estimate = convert_peak(weights, stored) // _MIB
        yield {**sizes, "step": "convert", "estimate_mib": estimate, **row}
        for precision in precisions:
            command = ["export", str(checkpoint), "--out", str(out), "--precision", precision]
            estimate = EXPORT[precision].bytes_for(weights) // _MIB
            row = {"step": f"export {precision}", "estimate_mib": estimate, **measured(command)}
            yield {**sizes, **row}
            shutil.rmtree(out, ignore_errors=True)


def main() -> int:
    """Measure the models that were named."""
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", type=Path, help="folders of real_models.py")
    parser.add_argument("--precision", nargs="*", default=["fp32"], choices=list(EXPORT))
    parser.add_argument("--calibrate-on", help="images for int8")
    given = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    about = {"commit": commit.strip(), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    before = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    found = [row for row in before if row["model"] not in {model.name for model in given.models}]
    for model in given.models:
        for row in rows(model, given.precision, given.calibrate_on):
            if "peak_mib" in row:
                row["over_weights"] = row["peak_mib"] / row["weights_mib"]
            print(row, flush=True)
            found.append({**about, **row})
            write_result(RESULTS, {"machine": this_machine().to_dict(), "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
