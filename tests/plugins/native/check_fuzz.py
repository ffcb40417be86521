# SPDX-License-Identifier: Apache-2.0
"""`make check-native`: every kernel under AddressSanitizer and UBSan, driven by hypothesis.

Not part of the ordinary test run: it compiles a library of its own and takes minutes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT, TESTS

from saccade.plugins.native import library
from saccade.plugins.ops import OPS

BUILD = ROOT / "build" / "check-native"
SANITIZE = (
    "-O1",
    "-g1",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=all",
)
EXAMPLES = 400


@pytest.fixture(scope="session")
def sanitized() -> Path:
    """The library with every memory access and every arithmetic step watched."""
    path = BUILD / library.source_hash()[:20] / library.NAME
    if not path.exists():
        library.compile_library(path, extra=SANITIZE)
    return path


def run(sanitized: Path, name: str) -> subprocess.CompletedProcess:
    """The driver in a process that has the sanitizer's run-time library from its start."""
    command = library.find_compiler()
    preloaded = [
        subprocess.run(
            [*command, f"-print-file-name={library}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for library in ("libasan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(TESTS / "plugins"),
        "LD_PRELOAD": " ".join(preloaded),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
    }
    driver = TESTS / "plugins" / "native" / "fuzz_kernels.py"
    return subprocess.run(
        [sys.executable, str(driver), name, str(sanitized), str(EXAMPLES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", OPS)
def test_no_crash_and_no_wrong_answer(name: str, sanitized: Path) -> None:
    done = run(sanitized, name)
    print(done.stdout)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def test_the_check_can_fail(sanitized: Path) -> None:
    done = run(sanitized, "overrun")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
