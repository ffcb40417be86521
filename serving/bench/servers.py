# SPDX-License-Identifier: Apache-2.0
"""Servers that a benchmark starts to measure its variants and policies.

It starts one server per precision, because a router never chooses the slower of two variants of one
budget. Policies, whose chains may have several precisions, then have another one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np

from saccade.core.leftovers import temporary_folder
from saccade.core.progress import Advance
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import FrontierEntry
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.serving.bench import served
from saccade.serving.bench.load import WARMUP_S, LoadGenerator, Stream, refuse_errors
from saccade.serving.bench.load_requests import server_version
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.served import Place, Windows
from saccade.serving.bench.stopping import rounds_suffice
from saccade.serving.bench.workload import Workload
from saccade.serving.client.texts import Labelling
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.repository.policies import NO_POLICIES, RouterPolicies
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

_ALL = "all"  # the key of the server of all precisions
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
    policies: RouterPolicies = NO_POLICIES,
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
            repository, runtime=runtime, op_library=op_library, policies=bool(policies.routes)
        )
        deploy(folder, options, labelling=labelling, policies=policies)
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
    if policies.works and len(parts) > 1:
        parts[_ALL] = list(variants), list(entries)
    *_, last = parts  # the only precision, or all
    windows = Windows()
    with ExitStack() as stack:
        running, streams = {}, {}
        for name, part in parts.items():
            running[name] = stack.enter_context(
                server_under_load(
                    workload.folder.only(*part),
                    runtime=options.runtime,
                    op_library=workload.ops == "kernels",
                    policies=policies.followed if name == last else NO_POLICIES,
                    labelling=policies.labelling if name == last else None,
                )
            )
        for name, server in running.items():
            works = [work for work in workload.all_works if precision[work.variant] == name]
            streams[name] = served.streams(server.url, works, options.concurrency)
        if policies.works:
            full, *_ = workload.works[policies.works[0].content.full]
            streams[last] |= served.policy_streams(
                running[last].url, policies, full, options.concurrency
            )
        for turn in range(options.rounds):
            left_s = workload.deadline.left
            for name, server in running.items():
                seconds, seed = options.window_s, options.seed + turn
                own = streams[name]
                server.measure(own, windows, seconds=seconds, seed=seed, advance=advance)
            rates = served.rates_of(windows, max(options.concurrency))
            round_s = left_s - workload.deadline.left
            if rounds_suffice(rates, workload.deadline.left, round_s):
                break
        version = next(iter(running.values())).version
    return version, windows
