# SPDX-License-Identifier: Apache-2.0
"""Requests to variants in a server, a check of their answers, and the figures of all rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from saccade.core.errors import ServerFailed
from saccade.exporter.artefact.frontier import ROUNDS, SECONDS
from saccade.exporter.gate.metrics import WHOLE, relative_error, tensor_limit
from saccade.models.interface import Arrays
from saccade.serving.bench.load import LoadResult, Stream
from saccade.serving.bench.load_requests import Answer, ask, png_files, request
from saccade.serving.bench.policy_works import PolicyWork, ServedPolicies
from saccade.serving.bench.work import Work

FULL = "full model"  # the key of its streams among those of policies, like no variant's name
POLICY_REQUESTS = 256  # more than of a variant, because these differ in cost
Place = tuple[str, str, str]  # variant, role (empty for plain requests), name of the point
Windows = dict[Place, list[LoadResult]]  # one of each round


def windows_of(windows: Windows, name: str) -> dict[tuple[str, str], list[LoadResult]]:
    """Return the windows of one variant or policy, by role and point."""
    return {place[1:]: own for place, own in windows.items() if place[0] == name}


def tensor_request(model: str, images: np.ndarray, *outputs: str) -> bytes:
    """Return a serialized request to a variant that takes images, with a raw tensor.

    Shapes: images uint8 [b h w c].
    """
    return request(model, {"image": images}, outputs or ("probabilities",))


def encoded_request(router: str, images: np.ndarray, budget: float, *outputs: str) -> bytes:
    """Return a serialized request to the router, with images as PNG files and a budget.

    Shapes: images uint8 [b h w c].
    """
    parameters = {"budget": repr(float(budget))}
    return request(router, {"image": png_files(images)}, outputs or ("probabilities",), parameters)


def check_answers(url: str, variant: str, message: bytes, expected: Arrays, precision: str) -> None:
    """Check that the server's answer is the answer of the artefact in process.

    The batch of the computation, or an engine, may change an answer as much as the gate allows.

    Shapes: expected has the outputs to compare, for the same rows as the request.
    Raises: ServerFailed with both answers if they differ.
    """
    answer: Answer = ask(url, message)
    for name, wanted in expected.items():
        actual = answer.get(name)
        if not _same(actual, wanted, precision):
            raise ServerFailed(
                f"{variant} at {url} answers with {name} {_shown(actual)}, expected "
                f"{_shown(wanted)} as in process. Write the repository again and restart the "
                "server."
            )


def _same(actual: np.ndarray | list[bytes] | None, wanted: np.ndarray, precision: str) -> bool:
    if isinstance(actual, list):
        return actual == list(wanted.ravel())
    return actual is not None and relative_error(actual, wanted, WHOLE) <= tensor_limit(precision)


def _shown(values: Any) -> str:
    if isinstance(values, np.ndarray) and values.dtype != object:
        return f"{values.shape} {np.round(values.ravel()[:10], 4).tolist()}"
    return f"{values}"


def routed_to(url: str, work: Work) -> str:
    """Return the variant that the router chooses for the budget of a work."""
    answer = ask(url, work.routed(0, "variant"))["variant"]
    return answer[0].decode() if isinstance(answer, list) else ""


def point_of(windows: Sequence[LoadResult]) -> dict[str, Any]:
    """Return one point of the frontier from the windows of one stream in all rounds."""
    rounds = [window.only.latencies_ms for window in windows]
    latencies = np.concatenate(rounds)
    quantiles = np.percentile(latencies, (50, 95, 99))
    client = sum(window.client_cpu_s for window in windows)
    server = sum(sum(window.server_cpu_s.values()) for window in windows)
    seconds = sum(window.seconds for window in windows)
    rates = [window.rate for window in windows]
    return {
        "inferences_per_second": round(len(latencies) / seconds, 2),
        "inferences_per_second_min": round(min(rates), 2),
        "inferences_per_second_max": round(max(rates), 2),
        ROUNDS: [round(rate, 2) for rate in rates],
        SECONDS: round(seconds, 4),
        **{f"p{q}_ms": round(float(v), 4) for q, v in zip((50, 95, 99), quantiles, strict=True)},
        "requests": len(latencies),
        "client_cpu_share": round(client / max(client + server, 1e-9), 4),
        "core_ms_per_request": round(1e3 * (client + server) / len(latencies), 4),
    }


def rates_of(
    results: Mapping[Place, Sequence[LoadResult]], concurrency: int
) -> dict[str, list[float]]:
    """Return requests per second in each round, of each variant and policy at that concurrency."""
    rates: dict[str, list[float]] = {}
    for kind in ("concurrency", "router_concurrency"):
        for (name, role, point), windows in results.items():
            if not role and point == f"{kind}_{concurrency}":
                rates.setdefault(name, [window.rate for window in windows])
    return rates


def raw(window: LoadResult) -> dict[str, Any]:
    """Return everything that one round measured of one stream, as plain values."""
    return {
        "seconds": window.seconds,
        "latencies_ms": list(window.only.latencies_ms),
        "client_cpu_s": window.client_cpu_s,
        "server_cpu_s": window.server_cpu_s,
        "statistics": window.statistics,
    }


def streams(url: str, works: Sequence[Work], concurrency: Sequence[int]) -> dict[Place, Stream]:
    """Return the streams to measure for each work: to the variant, and through the router.

    Raises: ServerFailed if a variant does not answer as expected.
    """
    streams: dict[Place, Stream] = {}
    for work in works:
        rows = range(len(work))
        _check(url, work)
        if work.model is not None:
            direct = tuple(work.direct(index) for index in rows)
            for count in concurrency:
                stream = Stream(f"{work.title}, {count} clients", work.model, count, direct)
                streams[(*work.key, f"concurrency_{count}")] = stream
        # Of two precisions of a budget, the router uses the faster: only that one is measured.
        if routed_to(url, work) == work.variant:
            routed = tuple(work.routed(index) for index in rows)
            # One client for the latency, more for the highest rate of a replica.
            for count in sorted({1, *concurrency}):
                name = f"{work.title}, routed, {count} clients"
                stream = Stream(name, work.router, count, routed)
                streams[(*work.key, f"router_concurrency_{count}")] = stream
    return streams


def policy_streams(
    url: str, policies: ServedPolicies, full: Work, concurrency: Sequence[int]
) -> dict[Place, Stream]:
    """Return the streams of policies through the router, with as many inputs as they have.

    `full` is the full model's work, whose requests are added if they are not in other streams.

    Raises: ServerFailed if a policy does not answer as expected.
    """
    inputs = policies.works[0].inputs  # of every policy
    work = replace(full, inputs={name: rows[:POLICY_REQUESTS] for name, rows in inputs.items()})
    for policy in policies.works:
        _check_policy(url, policy, work, policies.precisions)
    outputs = ("probabilities",) if policies.labelling else full.answers
    asked = {policy.title: {"policy": policy.policy.name} for policy in policies.works}
    if policies.full_alone:
        asked[FULL] = {"max_risk": "0"}  # a budget would choose the faster one of two precisions
    streams: dict[Place, Stream] = {}
    for title, parameters in asked.items():
        requests = tuple(
            work.routed(index, *outputs, parameters=parameters) for index in range(len(work))
        )
        for count in sorted({1, *concurrency}):
            stream = Stream(f"{title}, {count} clients", work.router, count, requests)
            streams[title, "", f"router_concurrency_{count}"] = stream
    return streams


def _check_policy(url: str, policy: PolicyWork, work: Work, precisions: Mapping[str, str]) -> None:
    """Check that the router's answer is that of the variant that it names, in process."""
    parameters = {"policy": policy.policy.name}
    message = work.routed(0, policy.decides, "variant", parameters=parameters)
    variant = ask(url, message)["variant"]
    by = variant[0].decode() if isinstance(variant, list) else ""
    if by not in policy.variants:
        raise ServerFailed(
            f"{policy.title} at {url} is answered by {by!r:.80}, expected one of "
            f"{', '.join(policy.variants)}."
        )
    expected = {policy.decides: policy.runs[policy.variants.index(by)](work.row(0))}
    check_answers(url, policy.title, message, expected, precisions[by])


def _check(url: str, work: Work) -> None:
    expected = work.run(work.row(0))
    names = ("logits",) if "logits" in expected else work.answers
    message = work.routed(0, *names) if work.model is None else work.direct(0, *names)
    wanted = {name: expected[name] for name in names}
    check_answers(url, work.title, message, wanted, work.precision)
