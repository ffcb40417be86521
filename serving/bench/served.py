# SPDX-License-Identifier: Apache-2.0
"""Variants and policies measured through servers: requests, a check of their answers, and load.

A benchmark starts one server per precision, because a router never chooses the slower of two
variants of one budget. Policies, whose chains may have several precisions, then have another one.
Variants of a group differ in budget, so one server has all.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from saccade.core.errors import ServerFailed
from saccade.core.leftovers import temporary_folder
from saccade.core.progress import Advance
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FrontierEntry
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.gate.metrics import WHOLE, relative_error, tensor_limit
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.models.interface import Arrays
from saccade.serving.bench.load import WARMUP_S, LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.load_requests import Answer, ask, server_version
from saccade.serving.bench.measurement import Place, Windows, rates_of
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.policies import FULL, PolicyWork, ServedPolicies
from saccade.serving.bench.stopping import rounds_suffice
from saccade.serving.bench.work import Key, Work
from saccade.serving.bench.workload import Workload
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

POLICY_REQUESTS = 256  # more than of a variant, because these differ in cost
_DIRECT, _ROUTED = "concurrency", "router_concurrency"
_ALL = "all"  # the key of the server of all precisions
# Free ports, no probes in between, and no restart that would mix two servers into one figure.
_QUIET = ServeOptions(
    grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600, restart=False
)


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


def chosen_variant(url: str, message: bytes) -> str:
    """Return the variant that the router chooses for a request with the output `variant`."""
    answer = ask(url, message)["variant"]
    return answer[0].decode() if isinstance(answer, list) else ""


def streams_of(
    key: Key,
    title: str,
    model: str,
    requests: tuple[bytes, ...],
    clients: Sequence[int],
    kind: str = _ROUTED,
) -> dict[Place, Stream]:
    """Return the streams of one kind of request, by place: one per number of clients."""
    return {
        (*key, f"{kind}_{count}"): Stream(f"{title}, {count} clients", model, count, requests)
        for count in clients
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
            direct = tuple(map(work.direct, rows))
            streams |= streams_of(work.key, work.title, work.model, direct, concurrency, _DIRECT)
        if work.step_only:
            continue
        # Of two precisions of a budget, the router uses the faster: only that one is measured.
        if chosen_variant(url, work.routed(0, "variant")) == work.variant:
            routed, title = tuple(map(work.routed, rows)), f"{work.title}, routed"
            streams |= streams_of(work.key, title, work.router, routed, _with_one(concurrency))
    return streams


def _with_one(concurrency: Sequence[int]) -> list[int]:
    """Return the numbers of clients: one for the latency, more for the best rate of a replica."""
    return sorted({1, *concurrency})


def policy_streams(
    url: str,
    policies: ServedPolicies,
    full: Work,
    precision: Mapping[str, str],
    concurrency: Sequence[int],
) -> dict[Place, Stream]:
    """Return the streams of policies through the router, with as many inputs as they have.

    `full` is the full model's work, whose requests are added if they are not in other streams;
    `precision` that of each variant.

    Raises: ServerFailed if a policy does not answer as expected.
    """
    inputs = policies.works[0].sent  # of every policy
    work = replace(full, inputs={name: rows[:POLICY_REQUESTS] for name, rows in inputs.items()})
    for policy in policies.works:
        _check_policy(url, policy, work, precision)
    outputs = ("probabilities",) if policies.labelling else full.answers
    chosen = {policy.title: {"policy": policy.policy.name} for policy in policies.works}
    if policies.full_alone:
        chosen[FULL] = {"max_risk": "0"}  # a budget would choose the faster one of two precisions
    streams: dict[Place, Stream] = {}
    for title, parameters in chosen.items():
        requests = tuple(
            work.routed(index, *outputs, parameters=parameters) for index in range(len(work))
        )
        clients = _with_one(concurrency)
        streams |= streams_of((title, ""), title, work.router, requests, clients)
    return streams


def _check_policy(url: str, policy: PolicyWork, work: Work, precision: Mapping[str, str]) -> None:
    """Check that the router's answer is that of the variant that it names, in process."""
    parameters = {"policy": policy.policy.name}
    message = work.routed(0, policy.decides, "variant", parameters=parameters)
    if (by := chosen_variant(url, message)) not in policy.variants:
        raise ServerFailed(
            f"{policy.title} at {url} is answered by {by!r:.80}, expected one of "
            f"{', '.join(policy.variants)}."
        )
    expected = {policy.decides: policy.served[policy.variants.index(by)](work.row(0))}
    check_answers(url, policy.title, message, expected, precision[by])


def _check(url: str, work: Work) -> None:
    expected = work.run(work.row(0))
    names = ("logits",) if "logits" in expected else work.answers
    message = work.routed(0, *names) if work.model is None else work.direct(0, *names)
    expected = {name: expected[name] for name in names}
    check_answers(url, work.title, message, expected, work.precision)


@dataclass(frozen=True)
class ServerUnderLoad:
    """The server of one precision's variants, and its load generator."""

    url: str
    version: str
    generator: LoadGenerator

    def measure(
        self,
        streams: Mapping[Place, Stream],
        windows: Windows,
        *,
        seconds: float,
        seed: int,
        advance: Advance,
    ) -> None:
        """Measure each stream alone, once, in random order so that drift affects all equally.

        A window is added at each place.
        Raises: ServerFailed if any request fails.
        """
        places = list(streams)
        for place in places:
            windows.setdefault(place, [])
        for index in np.random.default_rng(seed).permutation(len(places)):
            stream = streams[places[index]]
            result = self.generator.run([stream], seconds=seconds, warmup_s=WARMUP_S)
            windows[places[index]].append(refuse_errors(result, self.url))
            advance(1, stream.name)


def by_precision(
    variants: Sequence[VariantFiles], entries: Sequence[FrontierEntry]
) -> dict[str, tuple[list[VariantFiles], list[FrontierEntry]]]:
    """Return the measured variants of each precision, and their entries."""
    split = {}
    for precision in sorted({entry.precision for entry in entries}):
        own = {entry.variant: entry for entry in entries if entry.precision == precision}
        split[precision] = [one for one in variants if one.name in own], list(own.values())
    return split


@contextmanager
def server_under_load(
    folder: ArtefactFolder,
    *,
    runtime: str = DEFAULT,
    op_library: bool = True,
    policies: ServedPolicies = ServedPolicies(),  # noqa: B008 - it is frozen
) -> Iterator[ServerUnderLoad]:
    """Start a server of the folder's variants, and stop it at the end of the context.

    It follows these policies, not all of the folder: a folder is measured before it is calibrated,
    so an outdated one must not stop it.

    Raises: ServerFailed if it does not start.
    """
    with temporary_folder("bench") as temporary:
        repository, followed = temporary / "repository", policies.followed
        options = RepositoryOptions(
            repository, runtime=runtime, op_library=op_library, policies=bool(followed.routes)
        )
        deploy(folder, options, labelling=policies.labelling, policies=followed)
        with (
            Server(repository, _QUIET) as server,
            LoadGenerator(server.url, server_pid=server.pid) as generator,
        ):
            yield ServerUnderLoad(server.url, server_version(server.url), generator)


def through_servers(
    workload: Workload,
    entries: Sequence[FrontierEntry],
    options: BenchOptions,
    advance: Advance,
) -> tuple[str, Windows]:
    """Return the server's version, and the windows of each place in all rounds.

    Raises: ServerFailed if a server does not start, or does not answer as expected.
    """
    precision = {entry.variant: entry.precision for entry in entries}
    variants, policies = workload.folder.variants, workload.served
    parts = by_precision(variants, entries)
    if variants[0].in_group:  # no two variants have one budget
        parts = {_ALL: (list(variants), list(entries))}
    elif policies.works and len(parts) > 1:
        parts[_ALL] = list(variants), list(entries)
    *_, last = parts  # the only precision, or all
    windows = Windows()
    with ExitStack() as stack:
        running, streams_by = {}, {}
        for name, part in parts.items():
            running[name] = stack.enter_context(
                server_under_load(
                    workload.folder.only(*part),
                    runtime=options.runtime,
                    op_library=workload.ops == "kernels",
                    policies=policies if name == last else ServedPolicies(),
                )
            )
        for name, server in running.items():
            alone = len(running) == 1
            works = [one for one in workload.all_works if alone or precision[one.variant] == name]
            streams_by[name] = streams(server.url, works, options.concurrency)
        if policies.works:
            full, *_ = workload.works[policies.works[0].content.full]
            url, clients = running[last].url, options.concurrency
            streams_by[last] |= policy_streams(url, policies, full, precision, clients)
        for turn in range(options.rounds):
            left_s = workload.deadline.left
            for name, server in running.items():
                seconds, seed = options.window_s, options.seed + turn
                own = streams_by[name]
                server.measure(own, windows, seconds=seconds, seed=seed, advance=advance)
            rates = rates_of(windows, max(options.concurrency))
            round_s = left_s - workload.deadline.left
            if rounds_suffice(rates, workload.deadline.left, round_s):
                break
        version = next(iter(running.values())).version
    return version, windows
