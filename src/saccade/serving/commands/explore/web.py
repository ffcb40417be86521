# SPDX-License-Identifier: Apache-2.0
"""HTTP side of the page: on loopback only, for this machine's own names, with uploads capped."""

import socket
import webbrowser
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from saccade.errors import SaccadeError
from saccade.serving.commands.explore.explorer import MAX_BYTES
from saccade.serving.commands.explore.page import register

if TYPE_CHECKING:
    from saccade.serving.commands.explore.explore import Place

# A name that another site's owner has pointed at this machine is none of these.
HOSTS = ["127.0.0.1", "localhost"]
_FORM_BYTES = 2**20  # that a form adds to its file
_Asgi = Callable[[Any, Any, Any], Awaitable[None]]


def listen(port: int) -> socket.socket:
    """A socket on loopback; port 0 takes a free one.

    Raises: SaccadeError if the port is taken.
    """
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise SaccadeError(
            f"--port {port}: cannot listen there ({error.strerror}). "
            "Choose another port, or leave the option out for a free one."
        ) from error


def serve_page(listener: socket.socket, place: "Place", timeout_s: float, open_at: str) -> None:
    """Serve the page until Ctrl-C or SIGTERM; `open_at` is an address to open in the browser."""
    import uvicorn
    from fastapi import FastAPI
    from nicegui import ui
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_CappedUploads)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)
    register(place, timeout_s)
    ui.run_with(app, title="saccade explore", dark=None, language="en-US", favicon="👁",
                show_welcome_message=False)  # fmt: skip
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    if open_at:
        webbrowser.open(open_at)  # the socket listens already, so the browser only waits
    uvicorn.Server(config).run(sockets=[listener])


class _CappedUploads:
    """Refuse a body that is longer than any image, before it is read or stored."""

    def __init__(self, app: _Asgi) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            length = dict(scope["headers"]).get(b"content-length", b"")
            if not length.isdigit() or int(length) > MAX_BYTES + _FORM_BYTES:
                from starlette.responses import PlainTextResponse

                refused = PlainTextResponse("The file is too large.", status_code=413)
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)
