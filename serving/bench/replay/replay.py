# SPDX-License-Identifier: Apache-2.0
"""`saccade replay`: send requests when they are due, and judge the answers."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.sizes import counted
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FILE_NAME as FRONTIER
from saccade.serving.bench.load import LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.load_requests import request
from saccade.serving.bench.replay.arrivals import Arrivals, Generated, Source, read_log
from saccade.serving.bench.replay.figures import (
    blocks_of,
    mean,
    percentiles,
    recovery_s,
    share,
    shortest_s,
)
from saccade.serving.bench.replay.open_load import GRACE_S, OK, REFUSED, Ended, OpenOrder, send
from saccade.serving.bench.replay.options import ReplayOptions
from saccade.serving.bench.report_tables import table_of
from saccade.serving.client.client import Client
from saccade.serving.client.images import encoded
from saccade.serving.client.router_view import RouterView
from saccade.serving.client.wire import choice, image_input, server_timeout

SECONDS = 60.0  # of generated arrivals
CLIENTS, CAPACITY_S, WARMUP_S = 16, 4.0, 1.0
# The sender fell behind if one request in a hundred was sent so late, in parts of the deadline.
BEHIND = 0.05
LEAST_JUDGED = 100  # requests from which one in a hundred is more than a single accident
RECOVERED, MOSTLY = 0.99, 0.5


@dataclass(frozen=True)
class Replayed:
    """What a replay found; `behind` marks one whose sender was late, so it was another load.

    Units: phases have milliseconds from when a request was due, and shares with 95 % intervals;
        unsorted counts lines of the log that were earlier than the one before.
    """

    model: str
    deadline_ms: float
    capacity_per_s: float | None
    phases: tuple[dict[str, Any], ...]
    recovery_s: dict[str, float | None]
    unsorted: int
    sender: dict[str, float]
    behind: bool
    first_errors: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def to_text(self) -> Any:
        """Return the table, and what is to be known of it."""
        from rich.console import Group
        from rich.text import Text

        lines = [f"in time: answered within {self.deadline_ms:g} ms of when the request was due"]
        if self.capacity_per_s is not None:
            lines += [f"capacity of the largest budget: {self.capacity_per_s:,.1f} a second"]
        lines += [
            f"after the step: {what} {'not by the end' if s is None else f'in {s:.2f} s'}"
            for what, s in self.recovery_s.items()
        ]
        if self.unsorted:
            lines += [f"sorted: {counted(self.unsorted, 'line')} earlier than the one before"]
        lines += [f"{end}: {said}" for end, said in self.first_errors.items()]
        if self.behind:
            lines += [
                f"FELL BEHIND: one request in a hundred was sent {self.sender['lag_p99_ms']:.3g} "
                "ms late, or later, so this was another load. Pass more --senders, or run the "
                "command on a machine, or on cores, of its own."
            ]
        if any(one["in_time_interval"] is None for one in self.phases):
            least_s = shortest_s(self.deadline_ms)
            lines += [f"no intervals: with this deadline, they need {least_s:g} s in each row"]
        every = sorted({name for one in self.phases for name in one["variants"]}, reverse=True)
        names = {name: name.removeprefix(f"{self.model}-") for name in every}
        table = table_of("", [_cells(one, names) for one in self.phases])
        return Group(table.to_text(), Text("\n".join(lines)))


def _cells(one: dict[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    rates = {"in time": "in_time", "score": "score", "by score": "by_score"}
    shares = {}
    for heading, name in rates.items():
        if (value := one.get(name)) is not None:
            low_high = one[f"{name}_interval"]
            between = "-".join(f"{100 * bound:.2f}" for bound in low_high or ())
            shares[f"{heading} %"] = f"{100 * value:.2f}" + (f" ({between})" if between else "")
    return {
        "seconds": f"{one['begin_s']:g}-{one['end_s']:.4g}",
        "sent": f"{one['sent']:,}",
        "a second": f"{one['per_second']:,.1f}",
        **shares,
        **{name: f"{one[name]:,}" for name in ("late", "refused", "failed")},
        **{f"{name} ms": f"{ms:,.1f}" for name, ms in one["answered_ms"].items()},
        **{f"{s} %": f"{100 * one['variants'].get(n, 0):.1f}" for n, s in names.items()},
    }


def replay(
    log: Path | None,
    options: ReplayOptions,
    images: Sequence[Path] = (),
    scores: Mapping[str, float] | None = None,
) -> Replayed:
    """Send the requests of a log, or generated ones, to a running server when they are due.

    `scores` are by variant, and otherwise those of --scores.

    Raises: SaccadeError for a wrong log or option, or if the server refuses one of its kinds of
        request; ServerFailed if it does not answer.
    """
    if (log is None) == (options.arrivals is None):
        found = "neither a log nor --arrivals" if log is None else "a log and --arrivals"
        raise SaccadeError(f"Found {found}, expected one of them: it says when requests arrive.")
    generated = Generated.read(options.arrivals) if options.arrivals else None
    if generated and options.speed != 1:
        raise SaccadeError("Found --speed with --arrivals, expected a log. Pass another RATE.")
    arrivals = read_log(log, options.seconds) if log else None
    if scores is None:
        scores = _scores(options.scores) if options.scores else {}
    capacity = None
    with Client(options.url, options.model) as client:
        requests = Requests(options, client.view(), images)
        requests.try_out(client, arrivals.sources if arrivals else (Source(),))
    if generated:
        capacity = _capacity(requests) if generated.of_capacity else None
        seconds = options.seconds or SECONDS
        arrivals = generated.arrivals(generated.rate * (capacity or 1), seconds, options.seed)
    assert arrivals is not None
    arrivals = arrivals._replace(
        at_s=arrivals.at_s / options.speed, edges=arrivals.edges / options.speed
    )
    ended = send(requests.order(arrivals), options.senders)
    lag_ms, deadline_ms = float(np.percentile(ended.lag_ms, 99)), requests.deadline_ms
    return Replayed(
        model=options.model,
        deadline_ms=deadline_ms,
        capacity_per_s=capacity,
        phases=judged(arrivals, ended, deadline_ms, scores),
        recovery_s=recovered(arrivals, ended, deadline_ms),
        unsorted=arrivals.unsorted,
        sender={"lag_p99_ms": lag_ms, "cpu_s": ended.cpu_s},
        behind=len(ended.lag_ms) >= LEAST_JUDGED and lag_ms > BEHIND * deadline_ms,
        first_errors=ended.first_errors,
    )


def _scores(folder: Path) -> dict[str, float]:
    frontier = ArtefactFolder.open(folder).frontier
    if frontier is None or not frontier.entries:
        raise SaccadeError(
            f"--scores: {folder} has no {FRONTIER}, expected measured scores. Run: saccade bench "
            f"{folder} --out REPORT"
        )
    return {entry.variant: entry.score.value for entry in frontier.entries}


class Requests:
    """The requests of a replay: a head with what a source says, and a body with an image."""

    def __init__(self, options: ReplayOptions, view: RouterView, images: Sequence[Path]) -> None:
        deadline_ms = options.deadline_ms or view.slo_ms
        if deadline_ms is None:
            raise SaccadeError(
                f"{options.model} has no objective, so nothing says which answers are in time. "
                "Pass --deadline-ms, such as --deadline-ms 100."
            )
        self.options, self.view, self.deadline_ms = options, view, deadline_ms
        self._files = encoded(images) if images else []
        self.body = cache(self._body)

    def try_out(self, client: Client, sources: Sequence[Source]) -> None:
        """Send one request of each size and budget: a refusal is noticed before the load."""
        for size, budget in dict.fromkeys((source.size, source.budget) for source in sources):
            parameters = self._parameters(Source(budget=budget))
            client.infer({"image": [self._file(size, 0)]}, ("variant",), parameters=parameters)

    def head(self, source: Source, timeout_ms: float | None = None) -> bytes:
        """Return the serialized part of a request that has no image."""
        from tritonclient.grpc import service_pb2

        message = service_pb2.ModelInferRequest(model_name=self.options.model)
        message.id = f"{source.caller.replace('/', '_')}/1" if source.caller else ""
        for name, value in self._parameters(source).items():
            message.parameters[name].string_param = value
        if timeout_ms is not None:
            message.parameters["timeout"].int64_param = server_timeout(timeout_ms / 1e3)
        return bytes(message.SerializeToString())

    def order(self, arrivals: Arrivals) -> OpenOrder:
        """Return what the senders need; images take turns."""
        turns, sources = max(1, len(self._files)), arrivals.sources
        sizes = list(dict.fromkeys(source.size for source in sources))
        of_source = np.array([sizes.index(source.size) for source in sources])
        body = of_source[arrivals.source] * turns + np.arange(len(arrivals.at_s)) % turns
        return OpenOrder(
            self.options.url,
            np.stack([arrivals.at_s, arrivals.source, body], 1).tobytes(),
            tuple(self.head(source, self.deadline_ms) for source in sources),
            tuple(self.body(size, turn) for size in sizes for turn in range(turns)),
            self.deadline_ms / 1e3 + GRACE_S,
        )

    def _parameters(self, source: Source) -> dict[str, str]:
        if source.budget:
            return choice(source.budget)
        return choice(self.options.budget, policy=self.options.policy)

    def _body(self, size: tuple[int, int] | None, turn: int) -> bytes:
        """Return the serialized part with one image; parts that follow each other are merged."""
        outputs = ("variant", *(["degraded"] if self.view.slo_ms else []))
        return request(
            self.options.model, {"image": image_input([self._file(size, turn)])}, outputs
        )

    def _file(self, size: tuple[int, int] | None, turn: int) -> bytes:
        """Return an image's file: as given, or of this size in pixels, as a JPEG."""
        from PIL import Image

        if self._files and size is None:
            return self._files[turn]
        height, width = self.view.image_size()
        noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        given = Image.open(io.BytesIO(self._files[turn])) if self._files else None
        file, picture = io.BytesIO(), given or Image.fromarray(noise)
        picture.convert("RGB").resize(size or picture.size).save(file, "JPEG")
        return file.getvalue()


def _capacity(requests: Requests) -> float:
    """Measure requests per second of callers that wait, each for the largest budget."""
    view, options = requests.view, requests.options
    message = requests.head(Source(budget=view.budget(view.variants[0]))) + requests.body(None, 0)
    with LoadGenerator(options.url) as load:
        stream = Stream("capacity", options.model, CLIENTS, (message,))
        found = load.run([stream], seconds=CAPACITY_S, warmup_s=WARMUP_S)
    return refuse_errors(found, options.url).rate


def judged(
    arrivals: Arrivals, ended: Ended, deadline_ms: float, scores: Mapping[str, float]
) -> tuple[dict[str, Any], ...]:
    """Return the figures of each phase."""
    score = np.array([scores.get(name, np.nan) for name in ended.variant])
    answered, phases = ended.end == OK, []
    in_time = answered & (ended.ms <= deadline_ms)
    for begin_s, end_s in pairwise(arrivals.edges.tolist()):
        inside = (arrivals.at_s >= begin_s) & (arrivals.at_s <= end_s)
        blocks, good, known = (
            blocks_of(arrivals.at_s[inside], deadline_ms),
            in_time[inside],
            score[inside],
        )
        rates = {"in_time": share(good, blocks)}
        if (scored := good & ~np.isnan(known)).any():
            rates["score"] = mean(known, scored, blocks)
            rates["by_score"] = mean(np.where(scored, known, 0.0), scored | True, blocks)
        ends, names = Counter(ended.end[inside].tolist()), ended.variant[inside & answered]
        phases.append(
            {
                "begin_s": begin_s,
                "end_s": end_s,
                "sent": len(good),
                "per_second": len(good) / max(1e-9, end_s - begin_s),
                **{name: value for name, (value, _) in rates.items()},
                **{f"{name}_interval": interval for name, (_, interval) in rates.items()},
                "late": ends[OK] - int(good.sum()),
                "refused": ends[REFUSED],
                "failed": len(good) - ends[OK] - ends[REFUSED],
                "answered_ms": percentiles(ended.ms[inside & answered]),
                "refused_ms": percentiles(ended.ms[inside & (ended.end == REFUSED)]),
                "variants": {name: n / len(names) for name, n in Counter(names.tolist()).items()},
            }
        )
    return tuple(phases)


def recovered(arrivals: Arrivals, ended: Ended, deadline_ms: float) -> dict[str, float | None]:
    """Return the seconds after a step until answers are in time, and until they are as before."""
    if len(arrivals.edges) == 2:
        return {}
    at_s, end_s = arrivals.at_s, float(arrivals.edges[-2])
    good = (ended.end == OK) & (ended.ms <= deadline_ms)
    return {
        "99 % in time": recovery_s(at_s, good, end_s, RECOVERED),
        "half as without load": recovery_s(at_s, good & ~ended.degraded, end_s, MOSTLY),
    }
