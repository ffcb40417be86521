# SPDX-License-Identifier: Apache-2.0
"""Send a million requests and check whether anything grows, with a control that leaks on purpose.

The control serves the same repository with a router that keeps LEAK_BYTES per request. The same
checks must find the service clean and the control leaking.
"""

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chaos.driver import LEFT_S, copied, pace_of
from chaos.judge import Check, plain
from chaos.processes import descriptors
from chaos.results import add, tiny_repository_of
from chaos.scene import models_of, picture_request
from chaos.service import Service
from saccade.core.files import json_bytes, sha256_of
from saccade.core.machine import memory_mib, this_machine
from saccade.serving.bench.load import LoadGenerator, Stream

LEAK_BYTES = 4096
CONTROL_LEAST = 10_000  # with fewer requests the leak is below the floor
ALLOWED_BYTES = 64  # per request
# Less than this cannot be told from what an allocator keeps.
FLOOR_MIB = 12.0
WINDOWS = 30
LEAST_WINDOW_S, MOST_WINDOW_S = 2.0, 30.0
_LEAK = """
_kept, _whole = [], TritonPythonModel.execute

def _leaking(self, requests):
    _kept.extend(bytes(range(256)) * {times} for _ in requests)
    return _whole(self, requests)

TritonPythonModel.execute = _leaking
"""


@dataclass(frozen=True)
class Sample:
    """The state of the service between two windows. Units: requests so far, MiB by process."""

    requests: int
    memory_mib: dict[str, float]
    descriptors: int

    @property
    def total_mib(self) -> float:
        """The memory of all processes together."""
        return sum(self.memory_mib.values())


@dataclass(frozen=True)
class Soaked:
    """The result of a soak."""

    requests: int
    seconds: float
    failed: dict[str, int]
    samples: tuple[Sample, ...]
    restarts: int
    leftovers: list[str]
    last_words: str = ""  # of a service that restarted


def run_soak(given: argparse.Namespace) -> bool:
    """Run the soak and its control, and write each result as it finishes."""
    repository = given.repository or tiny_repository_of(given.build)
    least = given.control_requests or max(CONTROL_LEAST, given.requests // 20)
    passed = True
    with copied(repository) as leaking:
        make_leak(leaking)
        for name, place, requests in (
            ("control", leaking, least), ("soak", repository, given.requests)
        ):  # fmt: skip
            result = soak(place, requests, most_s=60 * given.minutes)
            checks = judge_soak(result)
            grew = [check for check in checks if not check.passed]
            wanted = (
                [check.what for check in grew] == ["memory grows"]
                if name == "control"
                else not grew
            )
            print(f"{'ok' if wanted else 'NO'} {name}: {result.requests} requests in "
                  f"{result.seconds:.0f} s", flush=True)  # fmt: skip
            for check in checks:
                print(f"   {check.what}: {check.found}; allowed {check.wanted}", flush=True)
            entry = {"passed": wanted, "checks": plain(checks), **asdict(result)}
            add(given.out, (name,), entry | {"machine": this_machine().to_dict()})
            passed &= wanted
    return passed


def soak(repository: Path, requests: int, *, most_s: float = math.inf) -> Soaked:
    """Send `requests` requests of all kinds, in windows, and take a sample after each window.

    It stops after `most_s` seconds with the requests so far.
    """
    failed: Counter[str] = Counter()
    samples, done, seconds = [], 0, LEAST_WINDOW_S
    began = time.monotonic()
    with Service(repository) as service:
        streams = streams_of(repository)
        with LoadGenerator(service.grpc) as load:
            while done < requests and time.monotonic() - began < most_s:
                result = load.run(streams, seconds=seconds, warmup_s=0.2)
                here = sum(len(stream.latencies_ms) for stream in result.streams.values())
                for name, stream in result.streams.items():
                    if name == "refused":  # this stream expects exactly one kind of error
                        here += stream.errors.pop("INVALID_ARGUMENT", 0)
                    failed.update(stream.errors)
                done += here
                samples.append(sample(service, done))
                per_s = max(1.0, here / result.seconds)
                seconds = min(MOST_WINDOW_S, max(LEAST_WINDOW_S, requests / WINDOWS / per_s))
                print(f"   {done} requests, {samples[-1].total_mib:.0f} MiB", flush=True)
        restarts = service.servers_begun() - 1
        took_s = time.monotonic() - began
        words = service.last_words(40) if restarts else ""
        service.stop()
        left = service.leftovers_after(LEFT_S * pace_of(service))
    return Soaked(done, took_s, dict(failed), tuple(samples), restarts, left, words)


def streams_of(repository: Path) -> list[Stream]:
    """Return callers of the cheapest and the full variant, and one that is always refused."""
    models = models_of(repository)
    cheap, full, wrong = (
        picture_request(models, variant) for variant in (models.cheap, models.full, models.full)
    )
    wrong.parameters["budget"].string_param = "-1"
    return [
        Stream(name, models.router, count, (message.SerializeToString(),))
        for name, count, message in (("cheap", 24, cheap), ("full", 2, full), ("refused", 1, wrong))
    ]


def sample(service: Service, requests: int) -> Sample:
    """Return the current memory and descriptors."""
    living = service.watch.living()
    memory = {
        f"{process.program} {process.model}".strip(): sum(
            memory_mib([process.pid], files=False).values()
        )
        for process in living
    }
    return Sample(requests, memory, sum(descriptors(process.pid) for process in living))


def judge_soak(result: Soaked) -> list[Check]:
    """Check whether anything grew, failed, or was left."""
    grown_mib, per_request = growth(result.samples)
    first, last = result.samples[len(result.samples) // 3], result.samples[-1]
    leaks = grown_mib > FLOOR_MIB and per_request > ALLOWED_BYTES
    most = first.descriptors + 16
    return [
        Check("memory grows", f"{ALLOWED_BYTES} bytes a request, or {FLOOR_MIB:g} MiB",
              f"{per_request:.0f} bytes a request, {grown_mib:.1f} MiB", not leaks),
        Check("descriptors grow", f"to {most}", f"to {last.descriptors}",
              last.descriptors <= most),
        Check("requests fail", "none", str(result.failed or "none"), not result.failed),
        Check("restarts", "none", str(result.restarts), not result.restarts),
        Check("left at the end", "nothing", ", ".join(result.leftovers) or "nothing",
              not result.leftovers),
    ]  # fmt: skip


def growth(samples: Sequence[Sample]) -> tuple[float, float]:
    """Return the growth from the middle third to the last one: MiB, and bytes per request.

    Uses medians, because an allocator returns memory in steps. The first third is warm-up.
    """
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[-third:]
    if not middle:
        raise ValueError(f"{len(samples)} samples say nothing of growth; ask for more requests")
    grown = statistics.median(one.total_mib for one in last) - statistics.median(
        one.total_mib for one in middle
    )
    between = statistics.median(one.requests for one in last) - statistics.median(
        one.requests for one in middle
    )
    return grown, grown * 2**20 / between


def make_leak(repository: Path, leak_bytes: int = LEAK_BYTES) -> None:
    """Make the router keep some bytes of every request, and update the repository's hashes."""
    code = repository / models_of(repository).router / "1" / "model.py"
    code.write_text(code.read_text() + _LEAK.format(times=leak_bytes // 256))
    description = repository / "saccade.json"
    content: dict[str, Any] = json.loads(description.read_bytes())
    content["files"][code.relative_to(repository).as_posix()] = sha256_of(code)
    description.write_bytes(json_bytes(content))
