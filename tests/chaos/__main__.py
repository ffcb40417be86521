# SPDX-License-Identifier: Apache-2.0
"""Inject faults into a service and report who noticed.

    python -m chaos list
    python -m chaos run [ROW ...] [--times 2] [--seed 0]      writes benchmarks/results/chaos.json
    python -m chaos soak [--requests 1000000]                 adds the soak to it
    python -m chaos page                                      fills docs/reliability.md
    python -m chaos all                                       the three, one after the other

`make check-chaos` runs the last one. The exit code is 1 if a row, the soak or its control did not
give the wanted result.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from chaos import page, results, soak
from chaos.table import ROWS

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the requested command."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("list", "run", "soak", "page", "all"))
    parser.add_argument("rows", nargs="*", help="names of rows; default: all")
    parser.add_argument(
        "--times", type=int, default=1, help="repetitions of each row, at different moments"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of the soak")
    parser.add_argument(
        "--control-requests", type=int, help="requests of its control; default: a twentieth"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="time limit of the soak")
    parser.add_argument("--repository", type=Path, help="default: that of digits-sum")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/chaos.json")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "chaos")
    given = parser.parse_args()
    if given.action == "list":
        for row in ROWS:
            print(f"{row.name:20} {row.what}; {row.moment}")
        return 0
    passed = True
    if given.action in ("run", "all"):
        passed &= results.run_rows(given)
    if given.action in ("soak", "all"):
        passed &= soak.run_soak(given)
    if given.action in ("page", "all"):
        page.write()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
