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
from saccade.exporter.artefact.frontier import POLICIES, ROUNDS
from saccade.models.data.datasets import HELD_OUT, load_data
from saccade.models.data.options import DataOptions
from saccade.models.scores.results import wilson
from saccade.serving.bench.figures import bare_text, clients_of, interval_text, times_text
from saccade.serving.bench.load import LoadGenerator, Stream
from saccade.serving.bench.load_requests import png_files, request, server_version
from saccade.serving.bench.measurement import Place, Windows, point_of, ratio, windows_of
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.report_tables import table_of
from saccade.serving.bench.served import POLICY_REQUESTS, ServerUnderLoad, streams_of
from saccade.serving.bench.workload import DISTINCT_REQUESTS
from saccade.serving.client.client import Client, routers_at
from saccade.serving.client.connection import TLS
from saccade.serving.client.router_view import RouterView


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

        policies = self.full.get(POLICIES, ())
        rows = [_row(one["variant"], one) for one in self.full["variants"]]
        rows += [_row(_title(one["policy"]), one) for one in policies]
        words = (
            f"{self.full['model']} at {self.full['url']} ({self.full['server']}), through its "
            "router. xN: inferences per second with N clients; ms xN: p50/p95 with N clients. "
            f"Inputs: {self.full['data']}. No frontier.json was changed. The report is "
            f"{self.folder / 'report.json'}."
        )
        return Group(table_of("", rows).to_text(), *map(Text, (*map(policy_text, policies), words)))


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


def policy_text(policy: Mapping[str, Any]) -> str:
    """Compare a policy with the full model, in a sentence."""
    same = policy["agreement"]
    answers = (
        f"; same answer on {100 * same['value']:.2f} % of {same['n']:,} images" if same else ""
    )
    times = times_text(policy["times_full"])
    return f"Policy {policy['policy']}: {times} the throughput of {policy['full']}{answers}."


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
        answers = {} if labels is None else answers_of(client, images)
    streams = running_streams(view, images, options)
    windows = Windows()
    steps = len(streams) * options.rounds
    with LoadGenerator(options.url) as generator, progress_of("bench", steps) as advance:
        server = ServerUnderLoad(options.url, server_version(options.url), generator)
        for turn in range(options.rounds):
            seconds, seed = options.window_s, options.seed + turn
            server.measure(streams, windows, seconds=seconds, seed=seed, advance=advance)
    measured = {
        name: {
            "score": None if labels is None else _share(answers[name] == labels),
            "points": {
                str(clients_of(point)): point_of(own)
                for (_, point), own in windows_of(windows, name).items()
            },
        }
        for name in parameters_of(view)
    }
    full = {
        "schema": "saccade.running_report",
        "version": 1,
        "model": model,
        "url": options.url,
        "server": server.version,
        "data": options.data or "noise",
        "variants": [
            {"variant": name, "budget": view.budget(name), **measured[name]}
            for name in view.variants
        ],
        "machine": this_machine().to_dict(),  # machine of the clients
    }
    if view.policies:
        full[POLICIES] = policy_figures(view, measured, answers)
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
        return noise.integers(0, 256, (DISTINCT_REQUESTS, height, width, 3), dtype=np.uint8), None
    data = load_data(
        options.data, options.split or HELD_OUT, side_px=max(height, width),
        asked=DataOptions(skip_bad=options.skip_bad),
    )  # fmt: skip
    return data.images[: options.limit], data.labels[: options.limit]


def _title(policy: str) -> str:
    """Return the name of a policy among variants, whose names contain no space."""
    return f"policy {policy}"


def parameters_of(view: RouterView) -> dict[str, dict[str, str]]:
    """Return what a request to each variant and policy has to name."""
    variants = {name: {"budget": str(view.budget(name))} for name in view.variants}
    return variants | {_title(name): {"policy": name} for name in view.policies}


def answers_of(client: Client, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return the classes that each variant and policy gives to images.

    Shapes: by name or title, each [n].
    Raises: SaccadeError if the model does not classify images.
    """
    view, output = client.view(), "probabilities"
    view.require_output(output, "classify images")
    return {
        name: client.infer({"image": images}, [output], parameters=parameters)[output].argmax(-1)
        for name, parameters in parameters_of(view).items()
    }


def _share(true: np.ndarray) -> dict[str, Any]:
    hits, n = int(true.sum()), len(true)
    return {"value": hits / n, "interval": wilson(hits, n), "n": n}


def policy_figures(
    view: RouterView,
    measured: Mapping[str, Mapping[str, Any]],
    answers: Mapping[str, np.ndarray],
) -> list[dict[str, Any]]:
    """Return each policy's figures, beside those of the largest variant, at the most clients."""
    full = next(iter(view.variants))
    most = max(measured[full]["points"], key=int)
    policies = []
    for name in view.policies:
        own = measured[_title(name)]
        rates, of_full = (one["points"][most][ROUNDS] for one in (own, measured[full]))
        same = _share(answers[_title(name)] == answers[full]) if answers else None
        times = asdict(ratio(rates, of_full))
        policies.append(
            {"policy": name, "full": full, "agreement": same, "times_full": times, **own}
        )
    return policies


def running_streams(
    view: RouterView, images: np.ndarray, options: BenchOptions
) -> dict[Place, Stream]:
    """Return the streams by variant or policy, and clients: one PNG image per request."""
    streams: dict[Place, Stream] = {}
    files = png_files(images[:POLICY_REQUESTS])
    for name, parameters in parameters_of(view).items():
        # The requests to a policy differ in cost.
        distinct = DISTINCT_REQUESTS if name in view.variants else POLICY_REQUESTS
        requests = tuple(
            request(view.model, {"image": file[None]}, ("variant",), parameters)
            for file in files[:distinct]
        )
        streams |= streams_of((name, ""), name, view.model, requests, options.concurrency)
    return streams
