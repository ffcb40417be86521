# SPDX-License-Identifier: Apache-2.0
"""`saccade explore`: start a server for an artefact, or find one, and serve the page."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from saccade.errors import MissingPackage, SaccadeError, require
from saccade.escaped import escaped_message
from saccade.serving.commands.command import Answer, Result
from saccade.serving.server.addresses import ServeOptions


@dataclass(frozen=True)
class ExploreOptions:
    """Options of explore: what is asked, and where the page is."""

    url: str | None = None  # gRPC address of a running server, in place of an artefact
    port: int = 0  # of the page, on this machine only; 0: a free one
    open: bool = False  # open the page in your browser
    timeout_s: float = 30.0  # deadline of one request to the server

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise SaccadeError(
                f"--port {self.port} is not a port. Give 1 to 65535, or 0 for a free one."
            )


@dataclass(frozen=True)
class Place:
    """Server that answers the page, and what is known of the artefact behind it."""

    url: str
    models: tuple[str, ...]
    folder: Path | None = None
    examples: tuple[bytes, ...] = field(default=(), repr=False)  # images, as PNG


def explore(
    artefact: Annotated[
        Positional[Path | None],
        arg(help="what `saccade export` or `saccade repository` wrote; a server is started."),
    ] = None,
    options: ExploreOptions = ExploreOptions(),  # noqa: B008
) -> Result:
    """Ask a model about your own images, in the browser: answers, attention, every budget.

    The page is reachable from this machine only and loads nothing from elsewhere. Ctrl-C stops it.
    """
    if (artefact is None) == (options.url is None):
        given = "Both an artefact and --url were" if artefact else "Neither was"
        raise SaccadeError(
            f"{given} given, expected one: saccade explore FOLDER, or "
            "saccade explore --url 127.0.0.1:8001."
        )
    require("nicegui", extra="explore")
    from saccade.serving.commands.explore.web import listen, serve_page

    with listen(options.port) as listener, _place(artefact, options) as place:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        _say(f"explore {', '.join(place.models)} at {address}   (Ctrl-C stops)")
        with suppress(KeyboardInterrupt):
            serve_page(listener, place, options.timeout_s, open_at=address if options.open else "")
    _say("stopped.")
    return Answer({"stopped": address})


@contextmanager
def _place(artefact: Path | None, options: ExploreOptions) -> Iterator[Place]:
    if artefact is None:
        from saccade.serving.client.client import routers_at

        assert options.url is not None
        yield Place(options.url, routers_at(options.url, options.timeout_s))
        return
    from saccade.serving.server.server import Server

    free = ServeOptions(grpc_port=0, metrics_port=0, ready_port=0)
    with _repository(artefact) as repository:
        _say(f"starting a server for {artefact} ...")
        with Server(repository, free) as server:
            yield Place(server.url, (server.model,), artefact, _examples(artefact))


@contextmanager
def _repository(artefact: Path) -> Iterator[Path]:
    """A repository as it is; of an artefact folder, one that is removed in the end."""
    from saccade.exporter.artefact.manifest import SUFFIX
    from saccade.serving.repository.deploy import deploy
    from saccade.serving.repository.description import DESCRIPTION
    from saccade.serving.repository.options import RepositoryOptions

    if (artefact / DESCRIPTION).is_file():
        yield artefact
        return
    if artefact.is_file():
        raise SaccadeError(
            f"{artefact} is a file, expected a folder. Make one with: "
            f"saccade export {artefact} --out FOLDER"
        )
    if not next(artefact.glob(f"*{SUFFIX}"), None):
        raise SaccadeError(
            f"{artefact}: no artefact was found there, expected what `saccade export` wrote. "
            f"Make one with: saccade export CHECKPOINT --out {artefact}"
        )
    with tempfile.TemporaryDirectory(prefix="saccade-explore-") as name:
        yield deploy(artefact, RepositoryOptions(out=Path(name) / "repository")).folder


def _examples(artefact: Path, most: int = 6) -> tuple[bytes, ...]:
    """Images that the checkpoint in the folder keeps; none where there is no checkpoint."""
    import numpy as np

    from saccade.exporter.artefact.folder import ArtefactFolder
    from saccade.serving.commands.calls import image_png

    folder = ArtefactFolder.open(artefact)
    try:
        images = folder.parent.calibration.get("image") if folder.checkpoint else None
    except (MissingPackage, SaccadeError):  # a repository has none, or another lies there
        return ()
    if images is None or images.dtype != np.uint8 or images.ndim != 4:
        return ()
    chosen = np.linspace(0, len(images) - 1, min(most, len(images))).astype(int)
    return tuple(image_png(images[index]) for index in chosen)


def _say(text: str) -> None:
    print(escaped_message(f"saccade: {text}"), file=sys.stderr, flush=True)
