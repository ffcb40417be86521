# SPDX-License-Identifier: Apache-2.0
"""Measure a server that is running already, through its router."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.core.files import json_bytes, new_folder, write_atomically
from saccade.core.machine import this_machine
from saccade.core.progress import progress_of
from saccade.exporter.artefact.frontier import ROUNDS
from saccade.models.data.datasets import HELD_OUT, load_data
from saccade.models.scores.results import wilson
from saccade.serving.bench.figures import bare_text, interval_text, times_text
from saccade.serving.bench.load import LoadGenerator, Stream
from saccade.serving.bench.load_requests import png_files, request, server_version
from saccade.serving.bench.measurement import Place, Windows, point_of, ratio, windows_of
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.report_tables import table_of
from saccade.serving.bench.served import ServerUnderLoad
from saccade.serving.client.client import Client, routers_at
from saccade.serving.client.connection import TLS
from saccade.serving.client.router_view import RouterView

_DISTINCT = 64  # distinct requests per stream
_DISTINCT_OF_POLICY = 256  # its requests differ in cost


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
        from rich.console import Group
        from rich.text import Text

        named = [(one["variant"], one) for one in self.full["variants"]]
        named += [(_title(one["policy"]), one) for one in self.full.get("policies", ())]
        words = (
            f"{self.full['model']} at {self.full['url']} ({self.full['server']}), through its "
            "router. xN: inferences per second with N clients; ms xN: p50/p95 with N clients. "
            f"Inputs: {self.full['data']}. No frontier.json was changed. The report is "
            f"{self.folder / 'report.json'}."
        )
        table = table_of("", [_row(name, measured) for name, measured in named])
        found = map(_policy_text, self.full.get("policies", ()))
        return Group(table.to_text(), *map(Text, found), Text(words))


def _row(name: str, measured: Mapping[str, Any]) -> dict[str, str]:
    score, points = measured["score"], measured["points"]
    shown = score and {"unit": "share", **score}
    return {
        "variant": name,
        "top-1 %": bare_text(shown) if shown else "-",
        "95 %": interval_text(shown) if shown else "-",
        **{f"x{n}": f"{one['inferences_per_second']:,.1f}" for n, one in points.items()},
        **{f"ms x{n}": f"{one['p50_ms']:.1f}/{one['p95_ms']:.1f}" for n, one in points.items()},
    }


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
    windows = Windows()
    steps = len(streams) * options.rounds
    with LoadGenerator(options.url) as generator, progress_of("bench", steps) as advance:
        server = ServerUnderLoad(options.url, server_version(options.url), generator)
        for turn in range(options.rounds):
            seconds, seed = options.window_s, options.seed + turn
            server.measure(streams, windows, seconds=seconds, seed=seed, advance=advance)
    points = {
        name: {count: point_of(own) for (_, count), own in windows_of(windows, name).items()}
        for name, _, _ in streams
    }
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
        "server": server.version,
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


def _streams(view: RouterView, images: np.ndarray, options: BenchOptions) -> dict[Place, Stream]:
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
            streams[name, "", str(count)] = stream
    return streams
