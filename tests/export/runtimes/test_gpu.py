# SPDX-License-Identifier: Apache-2.0
"""The GPUs as their driver tells of them, by a driver that is not there."""

import ctypes
from typing import Any

import pytest

from saccade.exporter.runtimes.gpu import VISIBLE, Gpu, gpu_at_hand, gpus, visible_alone

CARDS = (("a card of Ada", (8, 9), 2**34), ("a card of Hopper", (9, 0), 80 * 2**30))


class Driver:
    """The calls of libcuda and libnvidia-ml that are made; each returns 0 where it did its work."""

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        self.broken = broken

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name in self.broken:
                return 999
            if name != "cuInit":
                getattr(self, f"_{name}")(*arguments)
            return 0

        return call

    def _cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802
        count._obj.value = len(CARDS)

    def _cuDeviceGet(self, device: Any, index: int) -> None:  # noqa: N802
        device._obj.value = index

    def _cuDeviceGetName(self, text: Any, _: int, device: Any) -> None:  # noqa: N802
        text.value = CARDS[device.value][0].encode()

    def _cuDeviceGetAttribute(self, found: Any, which: int, device: Any) -> None:  # noqa: N802
        found._obj.value = CARDS[device.value][1][(75, 76).index(which)]

    def _cuDeviceTotalMem_v2(self, found: Any, device: Any) -> None:  # noqa: N802
        found._obj.value = CARDS[device.value][2]

    def _cuDriverGetVersion(self, found: Any) -> None:  # noqa: N802
        found._obj.value = 13010

    def _nvmlInit_v2(self) -> None:  # noqa: N802
        pass

    def _nvmlSystemGetDriverVersion(self, text: Any, _: int) -> None:  # noqa: N802
        text.value = b"580.95"


def test_every_gpu_with_its_driver_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    ada = Gpu("a card of Ada", "8.9", "580.95", 2**34)
    assert gpus() == (ada, Gpu("a card of Hopper", "9.0", "580.95", 80 * 2**30))
    assert gpu_at_hand() == ada


@pytest.mark.parametrize(
    ("listed", "alone"),
    [
        (None, ("0", "1")),
        ("3,1", ("3", "1")),
        ("GPU-8932f937, GPU-b52a", ("GPU-8932f937", "GPU-b52a")),
        ("0,1,-1,2", ("0", "1")),  # what follows a wrong one is hidden
    ],
)
def test_a_process_that_finds_one_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, alone: tuple[str, ...]
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver())
    if listed is None:
        monkeypatch.delenv(VISIBLE, raising=False)
    else:
        monkeypatch.setenv(VISIBLE, listed)
    assert visible_alone() == alone


def test_a_driver_that_fails_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for call in ("cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceTotalMem_v2"):
        monkeypatch.setattr(ctypes, "CDLL", lambda _, call=call: Driver((call,)))
        assert gpus() == () and gpu_at_hand() is None
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver(("nvmlInit_v2",)))
    assert {each.driver for each in gpus()} == {"CUDA 13.1"}
