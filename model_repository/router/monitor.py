# SPDX-License-Identifier: Apache-2.0
"""The monitor of policies: does the traffic still lose as few answers as was certified?

While the router is idle, the full model answers a few images of policies' requests, too. Which ones
is drawn before anything is known of their answers, and what happens to a sample until it counts
does not depend on its answer either: so the samples are answers of idle time, and nothing else.
"""

import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import triton_python_backend_utils as pb
from answering import Answering, Arrays
from backlog import Ticket
from calls import call
from evidence import Evidence
from kept_samples import KeptSamples
from lane import Lane
from metrics import Metrics
from routes import RUN_FOLDER, PolicyRoute

FILE = "monitor.json"  # in the service's folder: the evidence outlives this process
LOOK_S = 0.02
MOST_WAITING = 8  # each has an image
# After a call, the monitor rests for this many times as long: it uses at most 1 % of the time.
PAUSE_TIMES = 99.0
MOST_REST_S = 1.0  # of the lanes before a call
# The caller of a sample, and the lane that decodes its image: lanes measure requests only.
NOBODY: Any = SimpleNamespace(
    is_cancelled=lambda: False, decoded=lambda *_: None, step=lambda: None
)


class SampledRow(NamedTuple):
    """One row of a request, until its answer is known."""

    ticket: Ticket  # a request for this row alone
    policy: PolicyRoute
    row: int
    decides: str  # the output that decides
    put: Callable[[Any], None]  # takes the row, and what its answer was decided by

    def answered(self, arrays: Arrays) -> None:
        """Take the request's answers by the only variant of a policy."""
        self.ended(arrays[self.decides][self.row])

    def ended(self, decided: np.ndarray | None) -> None:
        """Take what decides of the row's answer; None if the answer cannot count as lost."""
        self.put((self, None if decided is None else decided.copy()))


class PolicyMonitor:
    """Draws samples, and has the thread that compares their answers with the full model's."""

    def __init__(
        self,
        answering: Answering,
        lanes: Mapping[Any, Lane],
        metrics: Metrics,
        withdraw: Callable[[str, str], None],
        *,
        routers: int = 1,
        name: str = "",
    ) -> None:
        """`withdraw` takes the name of a policy and the reason.

        Each of several routers has a `name`, and judges its own answers: together they reject in
        error as rarely as one.
        """
        self._answering, self._lanes, self._metrics = answering, lanes, metrics
        self._withdraw, self._rules = withdraw, answering.routes.monitor
        folder = os.environ.get(RUN_FOLDER)
        file = FILE if routers == 1 else f"monitor-{name}.json"
        self._file = Path(folder) / file if folder else None
        self._states, self._keys = self._read(), dict[str, str]()
        self._evidence: dict[str, Evidence] = {}
        self._kept: KeptSamples | None = None
        self._random, self._took_s, self._next_s = random.Random(), 0.0, 0.0
        self._jobs, self._ended = SimpleQueue[Any](), threading.Event()
        for policy in answering.routes.policies:
            if limit := self._rules.limits.get(policy.name):
                limit = replace(limit, alpha=limit.alpha / routers)
                # Another certificate of the same name has evidence of its own.
                key = json.dumps([asdict(policy), asdict(limit)], sort_keys=True)
                state = self._states.get(key, {"risk": limit.rate, "alpha": limit.alpha})
                self._keys[policy.name], self._evidence[policy.name] = key, Evidence(**state)
                self._act(policy.name)
        threading.Thread(target=self._serve, daemon=True).start()

    def sampled(self, ticket: Ticket, policy: PolicyRoute) -> Ticket:
        """Return a request for which one of its rows is noted, if that is to be sampled."""
        drawn = self._random.random() < self._rules.share * ticket.rows
        wanted = self._rules.keep or policy.name in self._evidence
        # What decides of embeddings is not compared: their policies have no limit.
        if policy.embeds or not (drawn and wanted) or self._jobs.qsize() >= MOST_WAITING:
            return ticket
        row, family = self._random.randrange(ticket.rows), self._answering.family
        alone = ticket._replace(
            inputs={name: array[row : row + 1].copy() for name, array in ticket.inputs.items()},
            rows=1,
            parameters=family.of_row(ticket.parameters, row),
            wanted=(family.decides,),
            sender=NOBODY,
            deadline_s=None,
        )
        noted = SampledRow(alone, policy, row, family.decides, self._jobs.put)
        return ticket._replace(sampled=noted)

    def close(self) -> None:
        """Stop; what waits is dropped."""
        self._ended.set()
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) and not self._ended.is_set():
            while not self._may_run():
                if self._ended.wait(LOOK_S):
                    return
            try:
                self._judge(*job)
            except Exception as error:
                pb.Logger.log_warn(f"a sample of a policy's answers was lost: {error!r:.300}")

    def _may_run(self) -> bool:
        """Return whether all lanes have been idle for as long as a call takes."""
        rest_s = min(MOST_REST_S, self._took_s)
        rested = all(lane.rests(rest_s) for lane in self._lanes.values())
        return rested and time.monotonic() >= self._next_s

    def _judge(self, sampled: SampledRow, decided: np.ndarray | None) -> None:
        self._keep(sampled.ticket)
        name, began_s = sampled.policy.name, time.monotonic()
        if name not in self._evidence:
            return
        lost = decided is not None and self._differs(sampled, decided)
        if decided is not None:
            self._took_s = time.monotonic() - began_s
            self._next_s = time.monotonic() + PAUSE_TIMES * self._took_s
            self._metrics.monitored(name, "seconds", self._took_s)
        self._metrics.monitored(name, "differs" if lost else "same")
        self._evidence[name].add(lost=lost)
        self._write(name)
        self._act(name)

    def _differs(self, sampled: SampledRow, decided: np.ndarray) -> bool:
        """Return whether the full model gives another answer; this is the only call."""
        answering, policy = self._answering, sampled.policy
        full, family = answering.routes.named(policy.full), answering.family
        ticket = answering.on_route(sampled.ticket, full)
        answering.decode(full, NOBODY, ticket)
        ready = [answering.ready(full, ticket)]
        (arrays,) = answering.answers(full, ticket.role, ready, lambda *asked: call(*asked, 0))
        least = self._rules.limits[policy.name].min_ari
        return not family.agrees(decided, arrays[family.decides][0], least)

    def _act(self, name: str) -> None:
        """Withdraw a policy whose certificate is refuted."""
        evidence = self._evidence[name]
        if not evidence.refutes:
            return
        del self._evidence[name]
        lost, last = sum(evidence.recent), len(evidence.recent)
        reason = (
            f"policy '{name}' was withdrawn: {lost} of its last {last} sampled answers "
            f"({lost / last:.1%}) differed from the full model's, expected at most "
            f"{evidence.risk:.2%}; of all {evidence.samples} samples, {evidence.lost} did"
        )
        self._withdraw(name, reason)
        self._metrics.monitored(name, "withdrawn")
        pb.Logger.log_warn(
            f"{reason}. The full model answers its requests. Calibrate on images like those that "
            "the service receives now, and write the repository again"
        )

    def _keep(self, ticket: Ticket) -> None:
        if not self._rules.keep:
            return
        try:
            self._kept = self._kept or KeptSamples(Path(self._rules.keep))
            for name in self._answering.routes.components[ticket.role].encoded:
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

    def _write(self, name: str) -> None:
        self._states[self._keys[name]] = asdict(self._evidence[name])
        if self._file is None:
            return
        try:
            partial = self._file.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(self._states), "utf-8")
            partial.replace(self._file)
        except OSError as error:
            pb.Logger.log_warn(f"{self._file}: a restart would forget a sample: {error}")
