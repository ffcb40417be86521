# SPDX-License-Identifier: Apache-2.0
"""The monitor of policies: does the traffic still lose as few answers as was certified?

While the router is idle, the full model answers a few images of policies' requests, too. Which ones
is drawn before anything is known of their answers, and what happens to a sample until it counts
does not depend on its answer either: so the samples are answers of idle time, and nothing else.
"""

import hashlib
import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import triton_python_backend_utils as pb
from answering import Answering, Arrays
from backlog import Ticket
from calls import call
from evidence import Evidence
from kept_samples import KeptSamples
from lane import Lane
from metrics import Metrics
from routes import RUN_FOLDER, MonitorLimit, PolicyRoute, Routes

FILE = "monitor.json"
LOOK_S = 0.02
MOST_SAMPLED = 8  # each has an image
# After a call, the monitor rests for this many times as long: it uses at most 1 % of the time.
PAUSE_TIMES = 99.0
MOST_REST_S = 1.0  # of the lanes before a call


class Nobody:
    """The caller of a sample, and the lane that decodes its image."""

    def is_cancelled(self) -> bool:
        """Return false: a sample has no caller that could leave."""
        return False

    def decoded(self, *_: float) -> None:
        """Do not count: lanes measure requests only."""

    step = decoded


class SampledRow:
    """One row of a request, until its answer is known."""

    __slots__ = ("__weakref__", "_decides", "_put", "policy", "row", "ticket")

    def __init__(
        self, ticket: Ticket, policy: PolicyRoute, row: int, decides: str, put: Callable[..., None]
    ) -> None:
        """`ticket` is a request for this row alone; `put` takes this, and what was decided."""
        self.ticket, self.policy, self.row = ticket, policy, row
        self._decides, self._put = decides, put

    def answered(self, arrays: Arrays) -> None:
        """Take the request's answers by the only variant of a policy."""
        self.ended(arrays[self._decides][self.row])

    def ended(self, decided: np.ndarray | None) -> None:
        """Take what decides of the row's answer; None if the answer cannot count as lost."""
        self._put((self, None if decided is None else decided.copy()))


class Counted(NamedTuple):
    """A policy with the evidence against it, and its key in the file."""

    policy: PolicyRoute
    limit: MonitorLimit
    evidence: Evidence
    key: str


class PolicyMonitor:
    """Watches, and the thread that compares their answers with the full model's."""

    def __init__(
        self,
        answering: Answering,
        lanes: Mapping[Any, Lane],
        metrics: Metrics,
        withdraw: Callable[[str, str], None],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """`withdraw` takes the name of a policy and the reason."""
        rules = answering.routes.monitor
        self._answering, self._lanes, self._metrics = answering, lanes, metrics
        self._withdraw = withdraw
        self._share = rules.share if rules else 0.0
        self._file = Path(environment[RUN_FOLDER]) / FILE if environment.get(RUN_FOLDER) else None
        self._states = self._read()
        self._counted = {one.policy.name: one for one in counted(answering.routes, self._states)}
        self._kept = self._keeping(rules.keep) if rules and rules.keep else None
        self._random, self._open = random.Random(), WeakSet[SampledRow]()
        self._took_s, self._next_s = 0.0, 0.0
        self._jobs, self._ended = SimpleQueue[Any](), threading.Event()
        for name in [name for name, one in self._counted.items() if one.evidence.refutes]:
            self._refute(name)
        if rules:
            threading.Thread(target=self._serve, daemon=True).start()

    def sampled(self, ticket: Ticket, policy: PolicyRoute) -> Ticket:
        """Return a request with a sampled on one of its rows, if it is to be sampled."""
        drawn = self._share and self._random.random() < self._share * ticket.rows
        known = self._kept or policy.name in self._counted
        if not (drawn and known) or len(self._open) >= MOST_SAMPLED:
            return ticket
        row, family = self._random.randrange(ticket.rows), self._answering.family
        alone = ticket._replace(
            inputs={name: array[row : row + 1].copy() for name, array in ticket.inputs.items()},
            rows=1,
            parameters=family.of_row(ticket.parameters, row),
            wanted=(family.decides,),
            sender=Nobody(),
            deadline_s=None,
            adapted=None,
        )
        sampled = SampledRow(alone, policy, row, family.decides, self._jobs.put)
        self._open.add(sampled)
        return ticket._replace(sampled=sampled)

    def close(self) -> None:
        """Stop; what waits is dropped."""
        self._ended.set()
        self._jobs.put(None)

    def _serve(self) -> None:
        while job := self._jobs.get():
            while not self._may_run():
                if self._ended.wait(LOOK_S):
                    return
            try:
                self._judge(*job)
            except Exception as error:
                pb.Logger.log_warn(f"a sample of a policy's answers was lost: {error!r:.300}")
            del job  # its sampled may be in the way of another one

    def _may_run(self) -> bool:
        """Return whether all lanes have been idle for as long as a call takes."""
        rest_s = min(MOST_REST_S, self._took_s)
        rested = all(lane.rests(rest_s) for lane in self._lanes.values())
        return rested and time.monotonic() >= self._next_s

    def _judge(self, sampled: SampledRow, decided: np.ndarray | None) -> None:
        self._keep(sampled.ticket)
        name, began_s = sampled.policy.name, time.monotonic()
        if (one := self._counted.get(name)) is None:
            return
        lost = decided is not None and self._differs(sampled, decided, one.limit.min_ari)
        if decided is not None:
            self._took_s = time.monotonic() - began_s
            self._next_s = time.monotonic() + PAUSE_TIMES * self._took_s
            self._metrics.monitored(name, "seconds", self._took_s)
        self._metrics.monitored(name, "differs" if lost else "same")
        one.evidence.add(lost=lost)
        self._states[one.key] = one.evidence.state
        self._write()
        if one.evidence.refutes:
            self._refute(name)

    def _differs(self, sampled: SampledRow, decided: np.ndarray, least: float | None) -> bool:
        """Return whether the full model gives another answer; this is the only call."""
        answering, full = self._answering, self._answering.routes.named(sampled.policy.full)
        ticket = answering.on_route(sampled.ticket, full)
        answering.decode(full, Nobody(), ticket)  # type: ignore[arg-type]
        (arrays,) = answering.answers(
            full,
            ticket.role,
            [answering.ready(full, ticket)],
            lambda model, inputs, outputs: call(model, inputs, outputs, 0),
        )
        family = answering.family
        return not family.agrees(decided, arrays[family.decides][0], least)

    def _refute(self, name: str) -> None:
        reason = refuted(self._counted.pop(name))
        self._withdraw(name, reason)
        self._metrics.monitored(name, "withdrawn")
        pb.Logger.log_warn(
            f"{reason}. The full model answers its requests. Calibrate on images like those that "
            "the service receives now, and write the repository again"
        )

    def _keeping(self, folder: str) -> KeptSamples | None:
        try:
            return KeptSamples(Path(folder))
        except OSError as error:
            pb.Logger.log_warn(f"{folder}: sampled images are not kept: {error}")
            return None

    def _keep(self, ticket: Ticket) -> None:
        try:
            for name in self._answering.routes.components[ticket.role].encoded:
                if self._kept and ticket.inputs[name].dtype == object:
                    self._kept.keep(ticket.inputs[name].item())
        except OSError as error:
            pb.Logger.log_warn(f"a sampled image was not kept: {error}")

    def _read(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._file.read_bytes())) if self._file else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            pb.Logger.log_warn(f"{self._file}: what the monitor knew is lost: {error}")
            return {}

    def _write(self) -> None:
        if self._file is None:
            return
        try:
            partial = self._file.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(self._states), "utf-8")
            partial.replace(self._file)
        except OSError as error:
            pb.Logger.log_warn(f"{self._file}: a restart would forget the last sample: {error}")


def counted(routes: Routes, states: Mapping[str, Any]) -> list[Counted]:
    """Return the policies that are monitored, each with the evidence so far."""
    limits = routes.monitor.limits if routes.monitor else {}
    found = []
    for policy in routes.policies:
        if limit := limits.get(policy.name):
            text = json.dumps([asdict(policy), asdict(limit)], sort_keys=True)
            key = hashlib.sha256(text.encode()).hexdigest()
            evidence = Evidence(limit.rate, limit.alpha, states.get(key))
            found.append(Counted(policy, limit, evidence, key))
    return found


def refuted(one: Counted) -> str:
    """Return why a policy is withdrawn, with the estimate."""
    evidence, recent = one.evidence, sum(one.evidence.recent)
    last = max(1, len(evidence.recent))
    return (
        f"policy '{one.policy.name}' was withdrawn: {recent} of its last {last} sampled answers "
        f"({recent / last:.1%}) differed from the full model's, expected at most "
        f"{one.limit.rate:.2%}; of all {evidence.samples} samples, {evidence.lost} did"
    )
