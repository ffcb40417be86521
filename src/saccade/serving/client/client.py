# SPDX-License-Identifier: Apache-2.0
"""Blocking client of a running server: labels, embeddings, slots, answers, captions, and more."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, TypeVar

from saccade.errors import SaccadeError
from saccade.serving.client import editing, operations
from saccade.serving.client.answers import Caption, Classification, Segmentation
from saccade.serving.client.connection import connect
from saccade.serving.client.editing import Change
from saccade.serving.client.embeddings import (
    Embeddings,
    check_embeddings_file,
    load_embeddings,
    save_embeddings,
)
from saccade.serving.client.probe import Prober
from saccade.serving.client.readiness import Board, Readiness
from saccade.serving.client.router_view import RouterView, view_of
from saccade.serving.client.rpc_errors import UnknownModel, explained
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

_T = TypeVar("_T")
_P = ParamSpec("_P")


def routers_at(url: str, timeout_s: float = 10) -> tuple[str, ...]:
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

    def __init__(self, url: str = DEFAULT_URL, model: str = "nac", timeout_s: float = 10) -> None:
        self.url = url
        self.model = model
        self.timeout_s = check_timeout(timeout_s)
        self._view: RouterView | None = None

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self.url, self.model, self.timeout_s)

    def _with_routers(self, error: UnknownModel) -> UnknownModel:
        """Return the error with the names of the server's routers, if it tells them."""
        try:
            return UnknownModel(self.url, self.model, routers_at(self.url, self.timeout_s))
        except SaccadeError:
            return error

    def _arguments(self, call: Call) -> dict[str, Any]:
        return {"model_name": self.model, **with_deadline(over_grpc(call), self.timeout_s)}


def _waiting(operation: Callable[_P, Steps[_T]]) -> Callable[Concatenate["Client", _P], _T]:
    """Turn an operation into a method that runs it to its end."""

    def method(self: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return operations.finished(operation(*args, **kwargs), self.view, self._infer)

    return operations.as_method(method, operation)


class Client(Session):
    """Blocking client of the router `model` on the server at `url`.

    Use a client from one thread at a time.

    Units: timeout_s is the deadline of each request, in seconds.
    Raises: every method raises SaccadeError if the request is wrong, and ServerFailed if the
        server is down or late, or a variant has died.
    """

    def __init__(self, url: str = DEFAULT_URL, model: str = "nac", timeout_s: float = 10) -> None:
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
    edit = _waiting(editing.edit)
    answer = _waiting(operations.answer)
    caption = _waiting(operations.caption)
    infer = _waiting(operations.infer)

    def ready(self) -> Readiness:
        """Run one inference on the router and on each variant, and return which ones answered."""
        variants = self._look().models
        prober = Prober(self.url, self.timeout_s)
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
            with self._explained():
                config = self._connection.get_model_config(
                    self.model, client_timeout=self.timeout_s
                )
        except UnknownModel as error:
            raise self._with_routers(error) from error
        return view_of(config, self.model)

    def _infer(self, call: Call) -> Any:
        with self._explained():
            return self._connection.infer(**self._arguments(call))
