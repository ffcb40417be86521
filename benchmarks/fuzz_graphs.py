# SPDX-License-Identifier: Apache-2.0
"""Fuzz the readers of ONNX files and manifests with many changed files, and write the counts.

    python benchmarks/fuzz_graphs.py --examples 100000 --minutes 60

The rule: each file is read or refused with SaccadeError within 5 s of CPU time, and the process
never uses more than 1 GiB.
"""

import argparse
import json
import multiprocessing
import platform
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fuzz_readers import KEPT, MOST_MIB, MOST_SECONDS, SCRATCH, timed, too_long

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "fuzz_graphs.json"
KINDS = ("graph", "manifest")


def fuzz(kind: str, examples: int, seconds: float, first: int) -> dict[str, Any]:
    """Fuzz one kind of file with `examples` seeds, or as many as time allows."""
    from graph_fuzz import outcome

    signal.signal(signal.SIGVTALRM, too_long)
    ended = {"read": 0, "refused": 0, "failed": 0}
    failures: list[dict[str, Any]] = []
    slowest, slowest_seed, start = 0.0, first, time.monotonic()
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        for seed in range(first, first + examples):
            if time.monotonic() - start > seconds:
                break
            took, end = timed(lambda: outcome(kind, seed, Path(folder)))  # noqa: B023
            if isinstance(end, dict):
                failures.append({"seed": seed, **end})
                end = "failed"
            ended[end] += 1
            if took > slowest:
                slowest, slowest_seed = took, seed
    return {
        "examples": sum(ended.values()),
        "first_seed": first,
        **ended,
        "failures": failures[:KEPT],
        "slowest_seconds": round(slowest, 3),
        "slowest_seed": slowest_seed,
        "largest_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> int:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "plugins")]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100_000, help="files of each kind")
    parser.add_argument("--minutes", type=float, default=60, help="time for all kinds together")
    parser.add_argument(
        "--kind", action="append", choices=KINDS, help="only this kind; keep other counts"
    )
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    kinds = given.kind or KINDS
    seconds = 60 * given.minutes / len(kinds)
    kept = given.kind and given.out.exists()
    counts = json.loads(given.out.read_text())["kinds"] if kept else {}
    for kind in kinds:  # one process each, so that memory is counted separately
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            counts[kind] = pool.apply(fuzz, (kind, given.examples, seconds, given.first))
        print(kind, json.dumps(counts[kind])[:600], flush=True)
    content = {
        "law": {"seconds": MOST_SECONDS, "mib": MOST_MIB, "traces": 0},
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "examples": sum(count["examples"] for count in counts.values()),
        "kinds": counts,
    }
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    broken = [
        kind for kind, count in counts.items() if count["failed"] or count["largest_mib"] > MOST_MIB
    ]
    print(f"failed: {', '.join(broken) or 'none'}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
