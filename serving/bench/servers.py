# SPDX-License-Identifier: Apache-2.0
"""Servers to measure with, one a precision: a router hides the slower of two of one budget."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from saccade.export.artefact.frontier import Entry, merge
from saccade.export.artefact.manifest import SUFFIX, Manifest
from saccade.export.runtimes.runtime import DEFAULT
from saccade.leftovers import temporary_folder
from saccade.progress import Advance
from saccade.serving.bench import served
from saccade.serving.bench.load import LoadGenerator, LoadResult, Stream
from saccade.serving.bench.load_requests import server_version
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

# Free ports, no probes in between, and no restart that would mix two servers into one figure.
_QUIET = ServeOptions(
    grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600, restart=False
)


@dataclass(frozen=True)
class Behind:
    """The server of one precision's variants, and what loads it."""

    url: str
    version: str
    generator: LoadGenerator

    def measure(
        self, streams: Mapping[served.Place, Stream], *, seconds: float, seed: int, advance: Advance
    ) -> dict[served.Place, LoadResult]:
        """Each stream alone, once, in an order drawn anew.

        Raises: ServerFailed if any request fails.
        """
        found = served.measure(
            self.generator, streams, seconds=seconds, rounds=1, seed=seed, advance=advance
        )
        return {place: results[0] for place, results in found.items()}


@contextmanager
def behind(
    folder: Path,
    manifests: Sequence[Manifest],
    entries: Sequence[Entry],
    precision: str,
    *,
    runtime: str = DEFAULT,
    op_library: bool = True,
) -> Iterator[Behind]:
    """A server of the folder's variants of that precision, with their entries as its frontier.

    Raises: ServerFailed if it does not start.
    """
    with (
        staged_repository(
            folder,
            [each for each in manifests if each.variant.precision == precision],
            [each for each in entries if each.precision == precision],
            runtime=runtime,
            op_library=op_library,
        ) as repository,
        Server(repository, _QUIET) as server,
        LoadGenerator(server.url, server_pid=server.pid) as generator,
    ):
        yield Behind(server.url, server_version(server.url), generator)


@contextmanager
def servers(
    folder: Path,
    manifests: Sequence[Manifest],
    entries: Sequence[Entry],
    *,
    runtime: str = DEFAULT,
    op_library: bool = True,
) -> Iterator[dict[str, Behind]]:
    """By precision, such a server.

    Raises: ServerFailed if one does not start.
    """
    with ExitStack() as stack:
        yield {
            precision: stack.enter_context(
                behind(
                    folder, manifests, entries, precision, runtime=runtime, op_library=op_library
                )
            )
            for precision in sorted({each.variant.precision for each in manifests})
        }


@contextmanager
def staged_repository(
    folder: Path,
    manifests: Sequence[Manifest],
    entries: Sequence[Entry],
    *,
    runtime: str = DEFAULT,
    op_library: bool = True,
) -> Iterator[Path]:
    """A repository of the folder's variants with these entries as its frontier, for a while."""
    with temporary_folder("bench") as temporary:
        staging = temporary / "artefacts"
        staging.mkdir()
        names = [manifests[0].parent.name]
        for manifest in manifests:
            names += [manifest.file.name, manifest.variant.name + SUFFIX]
        for name in names:
            if (folder / name).exists():
                _link(folder / name, staging / name)
        merge(staging, manifests[0].variant.model, entries)
        repository = temporary / "repository"
        deploy(staging, RepositoryOptions(repository, runtime=runtime, op_library=op_library))
        yield repository


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
