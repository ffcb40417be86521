# SPDX-License-Identifier: Apache-2.0
"""Run one row: a service, callers, the fault at a random moment, and the recovery."""

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from chaos.callers import Callers, Group
from chaos.faults import FAULTS
from chaos.file_faults import namespaces_allowed, small_disk
from chaos.judge import QUIET_START_S, Observation
from chaos.scene import Models, Scene, models_of, picture_request
from chaos.service import Service
from chaos.table import NO_CALLERS, START, Row

BEFORE_S = 4.0  # of calls before the fault, for comparison
MOMENT_S = 1.5  # the fault happens at a random moment in this time
AFTER_S = 1.0
LATEST_S = 120.0
LEFT_S = 2.0
DISK_MIB = 400
NEEDS_DISK = ("disk_full", "disk_full_at_start")


def run_row(row: Row, repository: Path, *, seed: int) -> Observation:
    """Run a row with its own service, stop it afterward, and look for leftovers."""
    with copied(repository) as own, ExitStack() as stack:
        service = Service(own, *row.serve, wrap=wrapping(row))
        if row.moment == START:
            return _refused(row, service, seed)
        stack.enter_context(service)
        seen = strike(row, service, models_of(repository), seed=seed)
        service.stop()
        seen.leftovers = service.leftovers_after(LEFT_S * pace_of(service))
        return seen


def strike(
    row: Row, service: Service, models: Models, *, seed: int, hurry: bool = False
) -> Observation:
    """Inject a row's fault into a running service, under the row's callers.

    With `hurry` nothing is timed, so no earlier calls are needed for comparison.
    """
    rng = random.Random(f"{seed} {row.name}")
    scene = Scene(service, models, rng)
    callers = Callers(service.grpc, groups_of(row, models))
    begun, memory = service.servers_begun(), service.watch.memory_mib()
    with ExitStack() as stack:
        if row.load != NO_CALLERS:
            stack.enter_context(callers)
            _until(lambda: callers.answered_since(0.0, least=10), LATEST_S)
        time.sleep((0.0 if hurry else BEFORE_S) + rng.uniform(0, 0.3 if hurry else MOMENT_S))
        began = time.monotonic()
        FAULTS[row.fault](scene)
        ended = time.monotonic()
        if row.load == NO_CALLERS and row.survives:
            stack.enter_context(callers)
        recovered_s = _recovered_s(row, service, callers, ended)
        time.sleep(0.3 if hurry else AFTER_S)
        memory_after = service.watch.memory_mib()
    for call in scene.until_over:
        call()
    return Observation(
        service.start_s, began, ended, callers.calls, scene.heard, scene.checks,
        servers=service.servers_begun() - begun, recovered_s=recovered_s,
        memory_mib=(memory, service.watch.peak_mib(), memory_after), words=callers.words,
    )  # fmt: skip


def groups_of(row: Row, models: Models) -> dict[str, Group]:
    """Return the victim's callers, and others if there are any."""

    def ask(variant: str, caller: str) -> Group:
        message = picture_request(models, variant)
        message.id = f"{caller}/1"  # identifies the caller to the service's fair queues
        return Group(message.SerializeToString())

    if row.victim == "all":
        return {"callers": ask(models.full, "callers")}
    victim, other = (models.cheap, models.full)
    if row.victim == "full":
        victim, other = other, victim
    return {"callers": ask(victim, "callers"), "others": ask(other, "others")}


def pace_of(service: Service) -> float:
    """Return how many times slower this machine is now than a quiet one."""
    return max(1.0, service.start_s / QUIET_START_S)


def untried(row: Row) -> str:
    """Say why a row cannot be run here; empty if it can."""
    if row.fault in NEEDS_DISK and not namespaces_allowed():
        return "this machine lets nobody mount a small disk"
    return ""


def wrapping(row: Row) -> list[str]:
    """Return the prefix of the service's command."""
    return small_disk(DISK_MIB) if row.fault == "disk_full" else []


@contextmanager
def copied(repository: Path) -> Iterator[Path]:
    """Make a copy that a fault may change."""
    with tempfile.TemporaryDirectory(prefix="saccade-chaos-") as place:
        yield Path(shutil.copytree(repository, Path(place) / "repository"))


def _refused(row: Row, service: Service, seed: int) -> Observation:
    """Run a row whose service must not start; only the fault's own checks count."""
    with tempfile.TemporaryDirectory(prefix="saccade-chaos-") as place:
        service.place = Path(place)
        scene = Scene(service, models_of(service.repository), random.Random(seed))
        began = time.monotonic()
        FAULTS[row.fault](scene)
        return Observation(QUIET_START_S, began, time.monotonic(), {}, checks=scene.checks)


def _recovered_s(row: Row, service: Service, callers: Callers, ended: float) -> float | None:
    """Return the time from the fault's end until all callers get answers and `/ready` says yes."""
    if not row.survives:
        return None
    latest = LATEST_S * min(2.0, pace_of(service))

    def over() -> bool:
        gone = service.process.poll() is not None
        return gone or (callers.answered_since(ended) and service.ready())

    whole = _until(over, latest) and service.process.poll() is None
    return time.monotonic() - ended if whole else None


def _until(holds: Callable[[], bool], within_s: float) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.05)
    return False
