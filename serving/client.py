# SPDX-License-Identifier: Apache-2.0
"""Classify and embed images through a running server."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from saccade.plugins.errors import SaccadeError
from saccade.serving.async_client import AsyncClient
from saccade.serving.connection import connect
from saccade.serving.embeddings import (
    Embeddings,
    check_embeddings_file,
    load_embeddings,
    save_embeddings,
)
from saccade.serving.images import Image
from saccade.serving.probe import Prober
from saccade.serving.readiness import Board, Readiness
from saccade.serving.rpc_errors import explain
from saccade.serving.wire import (
    DEFAULT_URL,
    Classification,
    check_timeout,
    choice,
    classifications,
    classify_calls,
    embed_calls,
    joined_embeddings,
    variants_of,
)

__all__ = [
    "AsyncClient",
    "Classification",
    "Client",
    "Embeddings",
    "check_embeddings_file",
    "load_embeddings",
    "routers_at",
    "save_embeddings",
]


def routers_at(url: str, timeout_s: float = 10) -> tuple[str, ...]:
    """The routers that a server has loaded.

    Raises: SaccadeError if it has none, ServerFailed if no server answers.
    """
    from tritonclient.utils import InferenceServerException

    connection = connect(url)
    try:
        # The list of models is not open to everyone; the statistics of all of them are.
        found = connection.get_inference_statistics(client_timeout=timeout_s).model_stats
        configs = [
            connection.get_model_config(one.name, client_timeout=timeout_s).config for one in found
        ]
    except InferenceServerException as error:
        raise explain(error, url, "the server", timeout_s) from error
    finally:
        connection.close()
    routers = tuple(config.name for config in configs if "variants" in config.parameters)
    if not routers:
        raise SaccadeError(
            f"{url}: the server there has no router of saccade. Is it the right one?"
        )
    return routers


class Client:
    """Calls the router `model` of the server at `url`; usable from one thread at a time.

    Units: timeout_s is seconds, the deadline of each request.
    Raises: every method SaccadeError where the request is wrong, ServerFailed where the server
        is down, late, or a variant has died.
    """

    def __init__(self, url: str = DEFAULT_URL, model: str = "nac", timeout_s: float = 10) -> None:
        self.url = url
        self.model = model
        self.timeout_s = check_timeout(timeout_s)
        self._connection = connect(url)

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def classify(
        self,
        images: Sequence[Image] | np.ndarray,
        budget: float | None = None,
        min_score: float | None = None,
        max_latency_ms: float | None = None,
        top: int = 3,
    ) -> list[Classification]:
        """The `top` labels of each image, by the variant that the one parameter chooses."""
        parameters = choice(budget, min_score, max_latency_ms)
        calls = classify_calls(images, parameters, top, self.timeout_s)
        return [found for call in calls for found in classifications(self._infer(call))]

    def embed(
        self, images: Sequence[Image] | np.ndarray, budget: float | None = None
    ) -> Embeddings:
        """One vector an image, all of the same variant.

        Shapes: vectors float32 [n d].
        """
        calls = embed_calls(images, choice(budget), self.timeout_s)
        return joined_embeddings([self._infer(call) for call in calls])

    def ready(self) -> Readiness:
        """Make one inference of each variant and of the router, and say which answered."""
        from tritonclient.utils import InferenceServerException

        try:
            config = self._connection.get_model_config(self.model, client_timeout=self.timeout_s)
        except InferenceServerException as error:
            raise explain(error, self.url, self.model, self.timeout_s) from error
        variants = variants_of(config, self.model)
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

    def _infer(self, call: dict[str, Any]) -> Any:
        from tritonclient.utils import InferenceServerException

        try:
            return self._connection.infer(self.model, **call)
        except InferenceServerException as error:
            raise explain(error, self.url, self.model, self.timeout_s) from error
