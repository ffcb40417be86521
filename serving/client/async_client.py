# SPDX-License-Identifier: Apache-2.0
"""Client for asyncio: the same methods as the blocking client, but awaitable."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from saccade.core.errors import SaccadeError
from saccade.serving.client import operations
from saccade.serving.client.client import Client, Session
from saccade.serving.client.connection import connect_asyncio
from saccade.serving.client.readiness import Readiness
from saccade.serving.client.request_sizes import FIRST_S
from saccade.serving.client.router_view import RouterView, view_of
from saccade.serving.client.rpc_errors import UnknownModel
from saccade.serving.client.wire import DEFAULT_URL, Call, Steps

_T = TypeVar("_T")
_P = ParamSpec("_P")


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
