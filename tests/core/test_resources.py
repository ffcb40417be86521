# SPDX-License-Identifier: Apache-2.0
"""Memory and disk space are compared with estimates before any work."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saccade.core import machine, resources
from saccade.core.errors import SaccadeError

GIB = 2**30


def group(root: Path, files: dict[str, str], version: int) -> None:
    """Write the files of a control group."""
    folder = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_limits_of_control_groups(tmp_path: Path) -> None:
    assert machine.control_groups(tmp_path) == []
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/box/inner\n1:cpu:/\n0::/scope\n")
    stat = "cache 7\ntotal_active_file 20\ntotal_inactive_file 30\nactive_file 1\ninactive_file 2\n"
    first = {"limit_in_bytes": "1000", "usage_in_bytes": "500", "stat": stat}
    group(tmp_path, {f"box/inner/memory.{name}": text for name, text in first.items()}, 1)
    second = {"max": "max", "current": "9", "stat": stat}
    group(tmp_path, {f"scope/memory.{name}": text for name, text in second.items()}, 2)
    assert machine.control_groups(tmp_path) == [(1000, 450)]
    outer = {"limit_in_bytes": "800", "usage_in_bytes": "10", "stat": stat}
    group(tmp_path, {f"box/memory.{name}": text for name, text in outer.items()}, 1)
    group(tmp_path, {"scope/memory.max": "70"}, 2)
    assert machine.control_groups(tmp_path) == [(800, 0), (1000, 450), (70, 6)]


def test_a_control_group_may_leave_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "control_groups", lambda: [(5 * GIB, GIB), (2 * GIB, GIB // 2)])
    assert machine.memory_limit_bytes() <= 2 * GIB
    assert machine.available_memory_bytes() <= 3 * GIB // 2


def test_a_limit_of_the_address_space_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (used + GIB, used + GIB))
    assert GIB // 2 < machine.available_memory_bytes() <= GIB + GIB // 8


@pytest.fixture
def machine_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the memory that is available and the space that is free, in GiB."""

    def make(memory: float, disk: float) -> None:
        free = SimpleNamespace(free=int(disk * GIB))
        monkeypatch.setattr(resources, "available_memory_bytes", lambda: int(memory * GIB))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: free)

    return make


def test_a_conversion_that_does_not_fit(machine_of: Any, tmp_path: Path) -> None:
    out = tmp_path / "not" / "yet" / "x.safetensors"
    machine_of(8, 5)
    resources.check_convert(out, 4 * GIB, 4 * GIB)
    machine_of(8, 3)
    with pytest.raises(SaccadeError, match=r"up to 4 GiB will be written, found 3 GiB free"):
        resources.check_convert(out, 4 * GIB, 4 * GIB)
    machine_of(5, 5)
    with pytest.raises(SaccadeError, match=r"the conversion needs about 6\.\d+ GiB.*found 5 GiB"):
        resources.check_convert(out, 4 * GIB, 4 * GIB)
    machine_of(7, 5)
    resources.check_convert(out, 4 * GIB, 4 * GIB)
    # A source in half precision is kept beside the weights in float32.
    with pytest.raises(SaccadeError, match=r"needs about 7\.89"):
        resources.check_convert(out, 4 * GIB, 2 * GIB)


def test_an_export_that_does_not_fit(machine_of: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    machine_of(10, 100)
    resources.check_export(out, ("fp32",), 1, 4 * GIB)
    machine_of(5.5, 100)
    resources.check_export(out, ("fp32",), 1, 2 * GIB)
    with pytest.raises(SaccadeError, match=r"the export in int8 needs about 5\.\d+ GiB of memory"):
        resources.check_export(out, ("fp32", "int8"), 1, 2 * GIB)
    machine_of(100, 5)
    resources.check_export(out, ("fp32", "int8"), 1, 2 * GIB)  # 2 + 2 + 0.5
    with pytest.raises(SaccadeError, match=r"up to 7 GiB will be written, found 5 GiB"):
        resources.check_export(out, ("fp32", "int8"), 2, 2 * GIB)


def test_int8_of_a_model_beyond_two_gib(machine_of: Any, tmp_path: Path) -> None:
    machine_of(100, 100)
    resources.check_export(tmp_path, ("fp32", "int8"), 1, 2 * GIB)
    with pytest.raises(SaccadeError, match=r"weights are 4 GiB in float32, expected at most 2 GiB"):
        resources.check_export(tmp_path, ("fp32", "int8"), 1, 4 * GIB)
