# SPDX-License-Identifier: Apache-2.0
"""Servers to measure with: those that a benchmark starts, or one that is running already.

A benchmark starts one server per precision, because a router never chooses the slower of two
variants of one budget. Policies, whose chains may have several precisions, then have another one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes, new_folder, write_atomically
from saccade.core.leftovers import temporary_folder
from saccade.core.machine import this_machine
from saccade.core.progress import Advance, progress_of
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import ROUNDS, FrontierEntry
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.models.data.datasets import HELD_OUT, load_data
from saccade.models.scores.intervals import wilson
from saccade.serving.bench import served
from saccade.serving.bench.load import LoadGenerator, LoadResult, Stream, refuse_errors
from saccade.serving.bench.load_requests import png_files, request, server_version
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.policies import ratio
from saccade.serving.bench.report_policies import times_text
from saccade.serving.client.client import Client, routers_at
from saccade.serving.client.connection import TLS
from saccade.serving.client.router_view import RouterView
from saccade.serving.client.zero_shot import Labelling
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.policies import ServedPolicy
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

WARMUP_S = 0.15
_DISTINCT = 64  # distinct requests per stream
_DISTINCT_OF_POLICY = 256  # its requests differ in cost
# Free ports, no probes in between, and no restart that would mix two servers into one figure.
_QUIET = ServeOptions(
    grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600, restart=False
)


@dataclass(frozen=True)
class ServerUnderLoad:
    """The server of one precision's variants, and its load generator."""

    url: str
    version: str
    generator: LoadGenerator

    def measure(
        self, streams: Mapping[served.Place, Stream], *, seconds: float, seed: int, advance: Advance
    ) -> dict[served.Place, LoadResult]:
        """Measure each stream alone, once, in random order so that drift affects all equally.

        Raises: ServerFailed if any request fails.
        """
        places, results = list(streams), dict[served.Place, LoadResult]()
        for index in np.random.default_rng(seed).permutation(len(places)):
            stream = streams[places[index]]
            result = self.generator.run([stream], seconds=seconds, warmup_s=WARMUP_S)
            results[places[index]] = refuse_errors(result, self.url)
            advance(1, stream.name)
        return {place: results[place] for place in places}


def by_precision(
    folder: ArtefactFolder, entries: Sequence[FrontierEntry]
) -> dict[str, ArtefactFolder]:
    """Split a folder by precision: the variants of these entries, with these as the frontier."""
    folders: dict[str, ArtefactFolder] = {}
    for precision in sorted({entry.precision for entry in entries}):
        own = {entry.variant: entry for entry in entries if entry.precision == precision}
        variants = (variant for variant in folder.variants if variant.name in own)
        folders[precision] = folder.only(variants, own.values())
    return folders


@contextmanager
def server_under_load(
    folder: ArtefactFolder,
    *,
    runtime: str = DEFAULT,
    op_library: bool = True,
    policies: tuple[ServedPolicy, ...] = (),
    labelling: Labelling | None = None,
) -> Iterator[ServerUnderLoad]:
    """Start a server of the folder's variants, and stop it at the end of the context.

    It follows these policies, not all of the folder: a folder is measured before it is calibrated,
    so an outdated one must not stop it.

    Raises: ServerFailed if it does not start.
    """
    with temporary_folder("bench") as temporary:
        repository = temporary / "repository"
        options = RepositoryOptions(
            repository, runtime=runtime, op_library=op_library, policies=bool(policies)
        )
        deploy(folder, options, labelling=labelling, policies=policies)
        with (
            Server(repository, _QUIET) as server,
            LoadGenerator(server.url, server_pid=server.pid) as generator,
        ):
            yield ServerUnderLoad(server.url, server_version(server.url), generator)


@dataclass(frozen=True)
class RunningReport:
    """Speed of a running server's variants through its router, and their scores on labeled data.

    The report.json in its folder has the same content.
    """

    folder: Path
    full: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**self.full, "folder": str(self.folder)}

    def to_text(self) -> Any:
        """Return a table for a terminal."""
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        points = list(self.full["variants"][0]["points"])
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="")
        headings = ("variant", "top-1 %", "95 %", *(f"x{point}" for point in points))
        for heading in (*headings, *(f"ms x{point}" for point in points)):
            table.add_column(heading, justify="left" if heading == "variant" else "right")
        named = [(variant["variant"], variant) for variant in self.full["variants"]]
        named += [(_title(policy["policy"]), policy) for policy in self.full.get("policies", ())]
        for name, measured in named:
            own, score = measured["points"], measured["score"]
            low, high = (100 * bound for bound in score["interval"]) if score else (0, 0)
            table.add_row(
                name,
                f"{100 * score['value']:.2f}" if score else "-",
                f"{low:.1f}-{high:.1f}" if score else "-",
                *(f"{own[point]['inferences_per_second']:,.1f}" for point in points),
                *(f"{own[point]['p50_ms']:.1f}/{own[point]['p95_ms']:.1f}" for point in points),
            )
        words = (
            f"{self.full['model']} at {self.full['url']} ({self.full['server']}), through its "
            "router. xN: inferences per second with N clients; ms xN: p50/p95 with N clients. "
            f"Inputs: {self.full['data']}. No frontier.json was changed. The report is "
            f"{self.folder / 'report.json'}."
        )
        found = map(_policy_text, self.full.get("policies", ()))
        return Group(table, *map(Text, found), Text(words))


def measure_running(options: BenchOptions) -> RunningReport:
    """Measure each variant and policy of a running server through its router.

    Every round has a new random order. With data, its test part is sent and scored, for which the
    model has to classify images. Without data, noise of the model's input size is sent, which has
    no score.

    Raises: SaccadeError for unsuitable data or models, ServerFailed if the server fails.
    """
    assert options.url is not None
    if options.url.startswith(TLS):
        raise SaccadeError(
            f"--url is {options.url}, expected HOST:PORT without TLS. Measure the server directly, "
            "behind its TLS proxy."
        )
    model = options.model or _only_router(options.url)
    with Client(options.url, model) as client:
        view = client.view()
        images, labels = _images(view, options)
        answers = _answers(client, images, labels)
    streams = _streams(view, images, options)
    results: dict[tuple[str, str], list[LoadResult]] = {place: [] for place in streams}
    steps = len(streams) * options.rounds
    with LoadGenerator(options.url) as generator, progress_of("bench", steps) as advance:
        for turn in range(options.rounds):
            places = list(streams)
            for index in np.random.default_rng(options.seed + turn).permutation(len(places)):
                stream = streams[places[index]]
                result = generator.run([stream], seconds=options.window_s, warmup_s=WARMUP_S)
                results[places[index]].append(refuse_errors(result, options.url))
                advance(1, stream.name)
    points: dict[str, dict[str, Any]] = {}
    for name, count in streams:
        point = served.point(streams[name, count], results[name, count])
        points.setdefault(name, {})[count] = point
    variants = [
        {
            "variant": name,
            "budget": view.budget(name),
            "score": _score(answers.get(name), labels),
            "points": points[name],
        }
        for name in view.variants
    ]
    full = {
        "schema": "saccade.running_report",
        "version": 1,
        "model": model,
        "url": options.url,
        "server": server_version(options.url),
        "data": options.data or "noise",
        "variants": variants,
        "machine": this_machine().to_dict(),  # machine of the clients
    }
    if view.policies:
        full["policies"] = _policies(view, points, answers, labels)
    with new_folder(options.out, force=options.force) as out:
        write_atomically(out / "report.json", json_bytes(full))
    return RunningReport(options.out, full)


def _only_router(url: str) -> str:
    names = routers_at(url)
    if len(names) > 1:
        raise SaccadeError(
            f"{url}: has the routers {', '.join(names)}, expected one. Choose one with --model."
        )
    return names[0]


def _images(view: RouterView, options: BenchOptions) -> tuple[np.ndarray, np.ndarray | None]:
    height, width = view.image_size()
    if options.data is None:
        if options.split is not None:
            raise SaccadeError(
                f"--split {options.split}: found no --data, expected the data to split. Pass "
                "--data, or leave --split out."
            )
        noise = np.random.default_rng(options.seed)
        return noise.integers(0, 256, (_DISTINCT, height, width, 3), dtype=np.uint8), None
    data = load_data(options.data, options.split or HELD_OUT, side_px=max(height, width))
    return data.images[: options.limit], data.labels[: options.limit]


def _answers(
    client: Client, images: np.ndarray, labels: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Return the classes that each variant and policy gives to labeled images; empty without.

    Shapes: by name or title, each [n].
    Raises: SaccadeError if the model does not classify images.
    """
    view = client.view()
    if labels is None:
        return {}
    view.require_output("probabilities", "classify images")
    asked = {name: {"budget": str(view.budget(name))} for name in view.variants}
    asked |= {_title(name): {"policy": name} for name in view.policies}
    return {
        name: client.infer({"image": images}, ["probabilities"], parameters=parameters)[
            "probabilities"
        ].argmax(-1)
        for name, parameters in asked.items()
    }


def _score(classes: np.ndarray | None, labels: np.ndarray | None) -> dict[str, Any] | None:
    """Return the top-1 of answers with its interval; None without labels."""
    if classes is None or labels is None:
        return None
    return _share(classes == labels)


def _share(true: np.ndarray) -> dict[str, Any]:
    hits, n = int(true.sum()), len(true)
    return {"value": hits / n, "interval": wilson(hits, n), "n": n}


def _policies(
    view: RouterView,
    points: Mapping[str, Mapping[str, Any]],
    answers: Mapping[str, np.ndarray],
    labels: np.ndarray | None,
) -> list[dict[str, Any]]:
    """Return each policy's figures, beside those of the largest variant, at the most clients."""
    full = next(iter(view.variants))
    most = max(points[full], key=int)
    measured = []
    for name in view.policies:
        own = points[_title(name)]
        given = answers.get(_title(name))
        times = ratio(own[most][ROUNDS], points[full][most][ROUNDS])
        same = None if given is None else _share(given == answers[full])
        measured.append(
            {
                "policy": name,
                "full": full,
                "score": _score(given, labels),
                "agreement": same,
                "times_full": asdict(times),
                "points": own,
            }
        )
    return measured


def _title(policy: str) -> str:
    """Return the name of a policy among variants, whose names contain no space."""
    return f"policy {policy}"


def _policy_text(policy: Mapping[str, Any]) -> str:
    same = policy["agreement"]
    answers = (
        f"; same answer on {100 * same['value']:.2f} % of {same['n']:,} images" if same else ""
    )
    times = times_text(policy["times_full"])
    return f"Policy {policy['policy']}: {times} the throughput of {policy['full']}{answers}."


def _streams(
    view: RouterView, images: np.ndarray, options: BenchOptions
) -> dict[tuple[str, str], Stream]:
    """Return the streams by variant or policy, and clients: one PNG image per request."""
    files, streams = png_files(images[:_DISTINCT_OF_POLICY]), {}
    asked: dict[str, tuple[Mapping[str, Any], int]] = {
        name: ({"budget": view.budget(name)}, _DISTINCT) for name in view.variants
    }
    asked |= {_title(name): ({"policy": name}, _DISTINCT_OF_POLICY) for name in view.policies}
    for name, (parameters, distinct) in asked.items():
        requests = tuple(
            request(view.model, {"image": file[None]}, ("variant",), parameters)
            for file in files[:distinct]
        )
        for count in options.concurrency:
            stream = Stream(f"{name}, {count} clients", view.model, count, requests)
            streams[name, str(count)] = stream
    return streams
