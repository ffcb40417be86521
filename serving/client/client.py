# SPDX-License-Identifier: Apache-2.0
"""Clients of a running server, blocking and asyncio: labels, embeddings, slots, and more."""

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, TypeVar

from saccade.core.errors import SaccadeError
from saccade.serving.client import operations
from saccade.serving.client.answers import Caption, Classification, Segmentation
from saccade.serving.client.connection import UnknownModel, connect, connect_asyncio, explained
from saccade.serving.client.embeddings import (
    Embeddings,
    check_embeddings_file,
    load_embeddings,
    save_embeddings,
)
from saccade.serving.client.operations import Change
from saccade.serving.client.readiness import Board, Prober, Readiness
from saccade.serving.client.request_sizes import FIRST_S, UNWATCHED, Pacing, Watch
from saccade.serving.client.router_view import RouterView, view_of
from saccade.serving.client.wire import (
    DEFAULT_URL,
    Call,
    Steps,
    check_timeout,
    over_grpc,
    with_deadline,
)

__all__ = [
    "Caption",
    "Change",
    "Classification",
    "Client",
    "Embeddings",
    "Segmentation",
    "check_embeddings_file",
    "load_embeddings",
    "routers_at",
    "save_embeddings",
]

# For the server's own answers, such as a router's description: no model is run for them.
METADATA_S = 10.0
_T = TypeVar("_T")
_P = ParamSpec("_P")


def routers_at(url: str, timeout_s: float = METADATA_S) -> tuple[str, ...]:
    """Return the names of the routers that a server has loaded.

    Raises: SaccadeError if there are none; ServerFailed if no server answers.
    """
    connection = connect(url)
    try:
        with explained(url, "the server", timeout_s):
            # A server may hide the list of models, but not the statistics of all models.
            models = connection.get_inference_statistics(client_timeout=timeout_s).model_stats
            configs = [
                connection.get_model_config(one.name, client_timeout=timeout_s).config
                for one in models
            ]
    finally:
        connection.close()
    routers = tuple(config.name for config in configs if "variants" in config.parameters)
    if not routers:
        raise SaccadeError(
            f"{url}: found a server without a saccade router, expected one that serves a "
            "repository of `saccade repository`. Check the address."
        )
    return routers


class Session:
    """Base of both clients: the server's address, the router to call, and its description."""

    def __init__(
        self, url: str = DEFAULT_URL, model: str = "nac", timeout_s: float | None = None
    ) -> None:
        self.url = url
        self.model = model
        self.timeout_s = None if timeout_s is None else check_timeout(timeout_s)
        self._metadata_s = self.timeout_s or METADATA_S
        self._pacing = Pacing(self.timeout_s)
        self._view: RouterView | None = None

    def _explained(self, timeout_s: float) -> AbstractContextManager[None]:
        return explained(self.url, self.model, timeout_s)

    def _with_routers(self, error: UnknownModel) -> UnknownModel:
        """Return the error with the names of the server's routers, if it tells them."""
        try:
            return UnknownModel(self.url, self.model, routers_at(self.url, self._metadata_s))
        except SaccadeError:
            return error

    def _arguments(self, call: Call) -> dict[str, Any]:
        limit_s = call.timeout_s or FIRST_S
        return {"model_name": self.model, **with_deadline(over_grpc(call), limit_s)}


def _waiting(operation: Callable[_P, Steps[_T]]) -> Callable[Concatenate["Client", _P], _T]:
    """Turn an operation into a method that runs it to its end."""

    def method(self: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self.run(operation(*args, **kwargs))

    return operations.as_method(method, operation)


class Client(Session):
    """Blocking client of the router `model` on the server at `url`.

    Use a client from one thread at a time. Many images are sent in several requests, which grow
    while they take less than about a second.

    Units: timeout_s is the deadline of each request, in seconds; None: ten times what is expected
        from the pace of earlier requests, at least 30 s, and 120 s while nothing was measured.
    Raises: every method raises SaccadeError if the request is wrong, and ServerFailed if the
        server is down or late, or a variant has died.
    """

    def __init__(
        self, url: str = DEFAULT_URL, model: str = "nac", timeout_s: float | None = None
    ) -> None:
        super().__init__(url, model, timeout_s)
        self._connection = connect(url)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    classify = _waiting(operations.classify)
    embed = _waiting(operations.embed)
    embed_text = _waiting(operations.embed_text)
    segment = _waiting(operations.segment)
    edit = _waiting(operations.edit)
    answer = _waiting(operations.answer)
    caption = _waiting(operations.caption)
    infer = _waiting(operations.infer)

    def run(self, steps: Steps[_T], watch: Watch = UNWATCHED) -> _T:
        """Run an operation, one of `operations`; `watch` is called on the way."""
        return operations.finished(self._pacing.requests(steps, watch), self.view, self._infer)

    def ready(self) -> Readiness:
        """Run one inference on the router and on each variant, and return which ones answered.

        Without a time limit of the client, a model may take as long as its usual pace allows.
        """
        variants = self._look().models
        prober = Prober(self.url, self._metadata_s, patient=self.timeout_s is None)
        try:
            probes = prober.all_of((self.model, *variants))
        finally:
            prober.close()
        board = Board(self.model, variants)
        board.enter("serving")
        for probe in probes:
            board.mark(probe.model, probe.reason)
        return board.readiness()

    def view(self) -> RouterView:
        """Return the router's description of itself, which is requested once and then kept."""
        if self._view is None:
            self._view = self._look()
        return self._view

    def _look(self) -> RouterView:
        try:
            with self._explained(self._metadata_s):
                config = self._connection.get_model_config(
                    self.model, client_timeout=self._metadata_s
                )
        except UnknownModel as error:
            raise self._with_routers(error) from error
        return view_of(config, self.model)

    def _infer(self, call: Call) -> Any:
        with self._explained(call.timeout_s or FIRST_S):
            return self._connection.infer(**self._arguments(call))


def _awaited(
    operation: Callable[_P, Steps[_T]],
) -> Callable[Concatenate["AsyncClient", _P], Coroutine[Any, Any, _T]]:
    """Turn an operation into a method that awaits its calls."""

    async def method(self: "AsyncClient", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await self._run(self._pacing.requests(operation(*args, **kwargs)))

    return operations.as_method(method, operation)


class AsyncClient(Session):
    """Client with the methods of `Client`, but awaitable: many calls can run at the same time.

    Units: timeout_s is the deadline of each request, in seconds; None: as for `Client`.
    """

    def __init__(
        self, url: str = DEFAULT_URL, model: str = "nac", timeout_s: float | None = None
    ) -> None:
        super().__init__(url, model, timeout_s)
        self._connection: Any = None

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    classify = _awaited(operations.classify)
    embed = _awaited(operations.embed)
    embed_text = _awaited(operations.embed_text)
    segment = _awaited(operations.segment)
    edit = _awaited(operations.edit)
    answer = _awaited(operations.answer)
    caption = _awaited(operations.caption)
    infer = _awaited(operations.infer)

    async def ready(self) -> Readiness:
        """Run one inference on the router and on each variant, and return which ones answered."""

        def ask() -> Readiness:
            with Client(self.url, self.model, self.timeout_s) as client:
                return client.ready()

        import asyncio  # which most commands do not need

        return await asyncio.to_thread(ask)

    async def view(self) -> RouterView:
        """Return the router's description of itself, which is requested once and then kept."""
        if self._view is None:
            try:
                with self._explained(self._metadata_s):
                    config = await self._connected().get_model_config(
                        self.model, client_timeout=self._metadata_s
                    )
            except UnknownModel as error:
                import asyncio

                raise await asyncio.to_thread(self._with_routers, error) from error
            self._view = view_of(config, self.model)
        return self._view

    async def _run(self, steps: Steps[_T]) -> _T:
        try:
            wanted = next(steps)
            while True:
                try:
                    answer = await (self.view() if wanted is None else self._infer(wanted))
                except SaccadeError as error:
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(answer)
        except StopIteration as end:
            returned: _T = end.value
            return returned

    async def _infer(self, call: Call) -> Any:
        with self._explained(call.timeout_s or FIRST_S):
            return await self._connected().infer(**self._arguments(call))

    def _connected(self) -> Any:
        if self._connection is None:
            # Create it inside the running loop, because it belongs to that loop.
            self._connection = connect_asyncio(self.url)
        return self._connection
