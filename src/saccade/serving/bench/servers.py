# SPDX-License-Identifier: Apache-2.0
"""Servers to measure with, one a precision: a router hides the slower of two of one budget."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.frontier import Entry
from saccade.exporter.runtimes.runtime import DEFAULT
from saccade.leftovers import temporary_folder
from saccade.progress import Advance
from saccade.serving.bench import served
from saccade.serving.bench.load import LoadGenerator, LoadResult, Stream, refuse_errors
from saccade.serving.bench.load_requests import server_version
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

_WARMUP_S = 0.15
# Free ports, no probes in between, and no restart that would mix two servers into one figure.
_QUIET = ServeOptions(
    grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600, restart=False
)


@dataclass(frozen=True)
class ServerUnderLoad:
    """The server of one precision's variants, and what loads it."""

    url: str
    version: str
    generator: LoadGenerator

    def measure(
        self, streams: Mapping[served.Place, Stream], *, seconds: float, seed: int, advance: Advance
    ) -> dict[served.Place, LoadResult]:
        """Each stream alone, once, in an order drawn anew: drift meets all alike.

        Raises: ServerFailed if any request fails.
        """
        places, results = list(streams), dict[served.Place, LoadResult]()
        for index in np.random.default_rng(seed).permutation(len(places)):
            stream = streams[places[index]]
            result = self.generator.run([stream], seconds=seconds, warmup_s=_WARMUP_S)
            results[places[index]] = refuse_errors(result, self.url)
            advance(1, stream.name)
        return {place: results[place] for place in places}


def by_precision(folder: ArtefactFolder, entries: Sequence[Entry]) -> dict[str, ArtefactFolder]:
    """By precision, the folder with the variants of these entries, and these as its frontier."""
    folders = {}
    for precision in sorted({entry.precision for entry in entries}):
        own = {entry.variant: entry for entry in entries if entry.precision == precision}
        variants = (variant for variant in folder.variants if variant.name in own)
        folders[precision] = folder.only(variants, own.values())
    return folders


@contextmanager
def server_under_load(
    folder: ArtefactFolder, *, runtime: str = DEFAULT, op_library: bool = True
) -> Iterator[ServerUnderLoad]:
    """A server of the folder's variants.

    Raises: ServerFailed if it does not start.
    """
    with temporary_folder("bench") as temporary:
        repository = temporary / "repository"
        deploy(folder, RepositoryOptions(repository, runtime=runtime, op_library=op_library))
        with (
            Server(repository, _QUIET) as server,
            LoadGenerator(server.url, server_pid=server.pid) as generator,
        ):
            yield ServerUnderLoad(server.url, server_version(server.url), generator)
