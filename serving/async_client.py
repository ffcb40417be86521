# SPDX-License-Identifier: Apache-2.0
"""The client for asyncio: the same calls, awaited."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from saccade.serving.connection import connect_asyncio
from saccade.serving.embeddings import Embeddings
from saccade.serving.images import Image
from saccade.serving.readiness import Readiness
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
)


class AsyncClient:
    """As `Client`, with awaitable methods; many calls may be under way at once.

    Units: timeout_s is seconds, the deadline of each request.
    """

    def __init__(self, url: str = DEFAULT_URL, model: str = "nac", timeout_s: float = 10) -> None:
        self.url = url
        self.model = model
        self.timeout_s = check_timeout(timeout_s)
        self._connection: Any = None

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    async def classify(
        self,
        images: Sequence[Image] | np.ndarray,
        budget: float | None = None,
        min_score: float | None = None,
        max_latency_ms: float | None = None,
        top: int = 3,
    ) -> list[Classification]:
        """The `top` labels of each image, by the variant that the one parameter chooses."""
        parameters = choice(budget, min_score, max_latency_ms)
        found = []
        for call in classify_calls(images, parameters, top, self.timeout_s):
            found += classifications(await self._infer(call))
        return found

    async def embed(
        self, images: Sequence[Image] | np.ndarray, budget: float | None = None
    ) -> Embeddings:
        """One vector an image, all of the same variant.

        Shapes: vectors float32 [n d].
        """
        calls = embed_calls(images, choice(budget), self.timeout_s)
        return joined_embeddings([await self._infer(call) for call in calls])

    async def ready(self) -> Readiness:
        """Make one inference of each variant and of the router, and say which answered."""
        from saccade.serving.client import Client

        def ask() -> Readiness:
            with Client(self.url, self.model, self.timeout_s) as client:
                return client.ready()

        return await asyncio.to_thread(ask)

    async def _infer(self, call: dict[str, Any]) -> Any:
        from tritonclient.utils import InferenceServerException

        if self._connection is None:
            # Made in the running loop, to which it belongs.
            self._connection = connect_asyncio(self.url)
        try:
            return await self._connection.infer(self.model, **call)
        except InferenceServerException as error:
            raise explain(error, self.url, self.model, self.timeout_s) from error
