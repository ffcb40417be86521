# SPDX-License-Identifier: Apache-2.0
"""Fail if a kernel spills registers to memory, according to the CUDA compiler's report."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

_KERNEL = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<target>\w+)'")
_SPILLS = re.compile(r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads")


def kernels(report: str) -> Iterator[tuple[str, str, int]]:
    """Yield name, architecture and spilled bytes of each kernel from `nvcc -Xptxas -v`."""
    kernel = None
    for line in report.splitlines():
        if match := _KERNEL.search(line):
            kernel = match
        elif kernel and (match := _SPILLS.search(line)):
            spilled = int(match["stores"]) + int(match["loads"])
            yield kernel["name"], kernel["target"], spilled
            kernel = None


def main(path: str) -> int:
    seen = list(kernels(Path(path).read_text()))
    bad = [kernel for kernel in seen if kernel[2]]
    for name, target, spilled in bad:
        print(f"{name} for {target} spills {spilled} bytes", file=sys.stderr)
    targets = sorted({target for _, target, _ in seen})
    print(f"{len(seen)} kernels for {', '.join(targets) or 'no architecture'}: {len(bad)} spill")
    return 1 if bad or not seen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
