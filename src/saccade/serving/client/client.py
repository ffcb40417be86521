# SPDX-License-Identifier: Apache-2.0
"""Ask a running server: labels, embeddings, slots, answers, captions, and anything else."""

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
from saccade.serving.client.rpc_errors import explained
from saccade.serving.client.wire import DEFAULT_URL, Call, Steps, check_timeout, with_deadline

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
    """The routers that a server has loaded.

    Raises: SaccadeError if it has none, ServerFailed if no server answers.
    """
    connection = connect(url)
    try:
        with explained(url, "the server", timeout_s):
            # The list of models is not open to everyone; the statistics of all of them are.
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
            f"{url}: the server there has no router of saccade. Is it the right one?"
        )
    return routers


class Session:
    """Session of either client: the server, the router that they call, and its description."""

    def __init__(self, url: str = DEFAULT_URL, model: str = "nac", timeout_s: float = 10) -> None:
        self.url = url
        self.model = model
        self.timeout_s = check_timeout(timeout_s)
        self._view: RouterView | None = None

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self.url, self.model, self.timeout_s)

    def _arguments(self, call: Call) -> dict[str, Any]:
        return {"model_name": self.model, **with_deadline(call, self.timeout_s)}


def _waiting(operation: Callable[_P, Steps[_T]]) -> Callable[Concatenate["Client", _P], _T]:
    """The method that runs an operation to its end."""

    def method(self: "Client", /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._run(operation(*args, **kwargs))

    return operations.as_method(method, operation)


class Client(Session):
    """Calls the router `model` of the server at `url`; usable from one thread at a time.

    Units: timeout_s is seconds, the deadline of each request.
    Raises: every method SaccadeError where the request is wrong, ServerFailed where the server
        is down, late, or a variant has died.
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
        """Make one inference of each variant and of the router, and say which answered."""
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
        """Description that the router gives of itself; asked for once."""
        if self._view is None:
            self._view = self._look()
        return self._view

    def _run(self, steps: Steps[_T]) -> _T:
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(self.view() if wanted is None else self._infer(wanted))
        except StopIteration as end:
            answer: _T = end.value
            return answer

    def _look(self) -> RouterView:
        with self._explained():
            config = self._connection.get_model_config(self.model, client_timeout=self.timeout_s)
        return view_of(config, self.model)

    def _infer(self, call: Call) -> Any:
        with self._explained():
            return self._connection.infer(**self._arguments(call))
