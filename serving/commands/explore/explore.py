# SPDX-License-Identifier: Apache-2.0
"""`saccade explore`: start a server for an artefact, or use a running one, and serve the page."""

import socket
import tempfile
import webbrowser
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from saccade.core.errors import MissingPackage, SaccadeError, require
from saccade.core.options import Options
from saccade.core.schema import Positive
from saccade.core.verbosity import say
from saccade.serving.commands.command import Answer, Result
from saccade.serving.commands.explore.explorer import MAX_BYTES, ExploreServer
from saccade.serving.server.addresses import Port, ServeOptions, port_in_use

# Excludes host names that the owner of another site has pointed at this machine.
HOSTS = ["127.0.0.1", "localhost"]
_FORM_BYTES = 2**20  # what a form adds to its file
_Asgi = Callable[[Any, Any, Any], Awaitable[None]]


@dataclass(frozen=True)
class ExploreOptions(Options):
    """Options of explore: the server to query, and where the page is."""

    url: str | None = None  # gRPC address of a running server, instead of an artefact
    port: Port = 0  # port of the page, on this machine only; 0 takes a free one
    open: bool = False  # open the page in your browser
    # deadline of each request to the server, in seconds; default: from the pace of those before
    timeout_s: Positive | None = None


def explore(
    artefact: Annotated[
        Positional[Path | None],
        arg(help="artefact folder or model repository; a server is started for it"),
    ] = None,
    options: ExploreOptions = ExploreOptions(),
) -> Result:
    """Try a model on your own images in the browser: answers, attention, every budget.

    The page is reachable only from this machine and loads nothing from elsewhere. Ctrl-C stops it.

    Examples:
        # open a page in your browser to try your own images
        saccade explore build/digits-sum --open
        # for a server that is already running
        saccade explore --url 127.0.0.1:8001
    """
    if (artefact is None) == (options.url is None):
        given = "both an artefact and --url" if artefact else "neither an artefact nor --url"
        raise SaccadeError(
            f"Found {given}, expected one of them: saccade explore FOLDER, or "
            "saccade explore --url 127.0.0.1:8001"
        )
    require("nicegui", extra="explore")
    with _listen(options.port) as listener, _place(artefact, options) as place:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        say(f"explore {', '.join(place.models)} at {address}   (Ctrl-C stops)")
        with suppress(KeyboardInterrupt):
            _serve_page(listener, place, options.timeout_s, open_at=address if options.open else "")
    say("stopped.")
    return Answer({"stopped": address})


@contextmanager
def _place(artefact: Path | None, options: ExploreOptions) -> Iterator[ExploreServer]:
    if artefact is None:
        from saccade.serving.client.client import METADATA_S, routers_at

        assert options.url is not None
        yield ExploreServer(options.url, routers_at(options.url, options.timeout_s or METADATA_S))
        return
    from saccade.serving.commands.explore.frontier_chart import measured
    from saccade.serving.server.server import Server

    frontier = measured(artefact)
    free = ServeOptions(grpc_port=0, metrics_port=0, ready_port=0)
    with _repository(artefact) as repository:
        say(f"starting a server for {artefact} ...")
        with Server(repository, free) as server:
            yield ExploreServer(server.url, (server.model,), frontier, _examples(artefact))


@contextmanager
def _repository(artefact: Path) -> Iterator[Path]:
    """Yield a repository as it is, or a temporary one made from an artefact folder."""
    from saccade.exporter.artefact.manifest import SUFFIX
    from saccade.serving.repository.deploy import deploy
    from saccade.serving.repository.description import DESCRIPTION
    from saccade.serving.repository.options import RepositoryOptions

    if (artefact / DESCRIPTION).is_file():
        yield artefact
        return
    if artefact.is_file():
        raise SaccadeError(
            f"{artefact}: found a file, expected a folder. Make one with: "
            f"saccade export {artefact} --out FOLDER"
        )
    if not next(artefact.glob(f"*{SUFFIX}"), None):
        raise SaccadeError(
            f"{artefact}: found no artefact, expected a folder that `saccade export` wrote. "
            f"Make one with: saccade export CHECKPOINT --out {artefact}"
        )
    with tempfile.TemporaryDirectory(prefix="saccade-explore-") as name:
        options = RepositoryOptions(out=Path(name) / "repository", policies=False)
        yield deploy(artefact, options).folder


def _examples(artefact: Path, most: int = 6) -> tuple[bytes, ...]:
    """Return images that the checkpoint in the folder contains; none without a checkpoint."""
    import numpy as np

    from saccade.exporter.artefact.folder import ArtefactFolder
    from saccade.serving.commands.pictures import image_png

    folder = ArtefactFolder.open(artefact)
    try:
        images = folder.parent.calibration.get("image") if folder.checkpoint else None
    except (MissingPackage, SaccadeError):  # a repository has none, or contains another one
        return ()
    if images is None or images.dtype != np.uint8 or images.ndim != 4:
        return ()
    chosen = np.linspace(0, len(images) - 1, min(most, len(images))).astype(int)
    return tuple(image_png(images[index]) for index in chosen)


def _listen(port: int) -> socket.socket:
    """A socket on loopback; port 0 takes a free one.

    Raises: SaccadeError if the port is taken.
    """
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise port_in_use("127.0.0.1", port, "--port", error) from error


def _serve_page(
    listener: socket.socket, place: ExploreServer, timeout_s: float | None, open_at: str
) -> None:
    """Serve the page until Ctrl-C or SIGTERM; `open_at` is an address to open in the browser."""
    import uvicorn
    from fastapi import FastAPI
    from nicegui import ui
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    from saccade.serving.commands.explore.page import register

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Gate)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)
    register(place, timeout_s)
    ui.run_with(app, title="saccade explore", dark=None, language="en-US", favicon="👁",
                show_welcome_message=False)  # fmt: skip
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    if open_at:
        webbrowser.open(open_at)  # the socket listens already, so the browser only waits
    uvicorn.Server(config).run(sockets=[listener])


class _Gate:
    """Refuse pages of other sites, and a body that is longer than any image, before it is read."""

    def __init__(self, app: _Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import PlainTextResponse

        headers, app = dict(scope.get("headers", ())), self._app
        origin, length = headers.get(b"origin"), headers.get(b"content-length", b"")
        if origin is not None and origin != b"http://" + headers.get(b"host", b""):
            app = PlainTextResponse("This is a page of another site.", status_code=403)
        elif scope.get("method") == "POST" and not (
            length.isdigit() and int(length) <= MAX_BYTES + _FORM_BYTES
        ):
            app = PlainTextResponse("The file is too large.", status_code=413)
        await app(scope, receive, send)
