# SPDX-License-Identifier: Apache-2.0
"""The client for asyncio: the same calls, awaited."""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from saccade.errors import SaccadeError
from saccade.serving.client import operations
from saccade.serving.client.answers import Caption, Classification, Segmentation
from saccade.serving.client.connection import connect_asyncio
from saccade.serving.client.editing import Change, edit
from saccade.serving.client.embeddings import Embeddings
from saccade.serving.client.images import Image
from saccade.serving.client.operations import Steps
from saccade.serving.client.readiness import Readiness
from saccade.serving.client.router_view import RouterView, view_of
from saccade.serving.client.rpc_errors import explain
from saccade.serving.client.wire import (
    DEFAULT_URL,
    Budget,
    Call,
    check_timeout,
    choice,
    with_deadline,
)
from saccade.serving.client.zero_shot import Labelling

_T = TypeVar("_T")


class AsyncClient:
    """As `Client`, with awaitable methods; many calls may be under way at once.

    Units: timeout_s is seconds, the deadline of each request.
    """

    def __init__(self, url: str = DEFAULT_URL, model: str = "nac", timeout_s: float = 10) -> None:
        self.url = url
        self.model = model
        self.timeout_s = check_timeout(timeout_s)
        self._connection: Any = None
        self._view: RouterView | None = None

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
        budget: Budget | None = None,
        min_score: float | None = None,
        max_latency_ms: float | None = None,
        top: int = 3,
        labels: Sequence[str] = (),
        templates: Sequence[str] = (),
    ) -> list[Classification]:
        """The `top` labels of each image, by the variant that the one parameter chooses.

        Without `labels` they are the model's, or those it was deployed with. With them a model
        of image and text compares the image with each label in each template, such as
        "a photo of a {}".
        """
        parameters = choice(budget, min_score=min_score, max_latency_ms=max_latency_ms)
        if not labels:
            if templates:
                raise SaccadeError("templates were given without labels. Give both, or neither.")
            return await self._run(operations.classify(images, parameters, top))
        labelling = Labelling(tuple(labels), tuple(templates))
        steps = operations.classify_as(images, labelling, parameters, top)
        return await self._run(steps)

    async def embed(
        self, images: Sequence[Image] | np.ndarray, budget: Budget | None = None
    ) -> Embeddings:
        """One vector an image, all of the same variant.

        Shapes: vectors float32 [n d].
        """
        return await self._run(operations.embed(images, choice(budget)))

    async def embed_text(
        self,
        texts: Sequence[str],
        budget: Budget | None = None,
        truncate: bool = False,
    ) -> Embeddings:
        """One vector a text, all of the same variant; long texts are cut only if asked to.

        Shapes: vectors float32 [n d].
        """
        return await self._run(operations.embed_text(texts, choice(budget), truncate))

    async def segment(
        self,
        images: Sequence[Image] | np.ndarray,
        budget: Budget | None = None,
        seed: int = 0,
        slots: int | None = None,
    ) -> list[Segmentation]:
        """The slots of each image; `seed` and the image's place in its request draw their start.

        A request takes up to 64 images: with the 65th the places begin anew.
        """
        return await self._run(operations.segment(images, choice(budget), seed, slots))

    async def edit(self, image: Image, change: Change, budget: Budget | None = None) -> np.ndarray:
        """The image with one slot moved, scaled or left out, as the model draws it.

        Shapes: -> uint8 [h w c].
        """
        return await self._run(edit(image, change, choice(budget)))

    async def answer(
        self,
        images: Sequence[Image] | np.ndarray | Mapping[str, np.ndarray],
        questions: Sequence[str],
        budget: Budget | None = None,
        top: int = 3,
        truncate: bool = False,
    ) -> list[Classification]:
        """The `top` answers to each question on the image of the same place.

        In place of images the features that the model takes, by name, where it takes features.
        A question that is too long is cut where `truncate` says so, else refused.
        """
        steps = operations.answer(images, questions, choice(budget), top, truncate)
        return await self._run(steps)

    async def caption(
        self,
        images: Sequence[Image] | np.ndarray | Mapping[str, np.ndarray],
        budget: Budget | None = None,
        beam: int | None = None,
        max_length: int | None = None,
        end: str | None = None,
    ) -> list[Caption]:
        """A sentence for each image, by a search of `beam` sentences at a time.

        Units: max_length is words; `end` is the word that ends a sentence.
        """
        given = {"beam": beam, "max_length": max_length, "end": end}
        own = {name: str(value) for name, value in given.items() if value is not None}
        return await self._run(operations.caption(images, choice(budget) | own))

    async def infer(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[str] | None = None,
        budget: Budget | None = None,
        parameters: Mapping[str, str] | None = None,
    ) -> dict[str, np.ndarray]:
        """Whatever the model takes and answers, by name: arrays, and images where it takes some.

        Shapes: every array has the samples as its first axis, of which there are the same number.
        """
        asked = choice(budget) | dict(parameters or {})
        return await self._run(operations.infer(inputs, outputs, asked))

    async def ready(self) -> Readiness:
        """Make one inference of each variant and of the router, and say which answered."""
        from saccade.serving.client.client import Client

        def ask() -> Readiness:
            with Client(self.url, self.model, self.timeout_s) as client:
                return client.ready()

        return await asyncio.to_thread(ask)

    async def view(self) -> RouterView:
        """What the router tells of itself; asked for once."""
        from tritonclient.utils import InferenceServerException

        if self._view is None:
            try:
                config = await self._connected().get_model_config(
                    self.model, client_timeout=self.timeout_s
                )
            except InferenceServerException as error:
                raise explain(error, self.url, self.model, self.timeout_s) from error
            self._view = view_of(config, self.model)
        return self._view

    async def _run(self, steps: Steps[_T]) -> _T:
        try:
            wanted = next(steps)
            while True:
                answer = await (self.view() if wanted is None else self._infer(wanted))
                wanted = steps.send(answer)
        except StopIteration as end:
            found: _T = end.value
            return found

    async def _infer(self, call: Call) -> Any:
        from tritonclient.utils import InferenceServerException

        try:
            return await self._connected().infer(self.model, **with_deadline(call, self.timeout_s))
        except InferenceServerException as error:
            raise explain(error, self.url, self.model, self.timeout_s) from error

    def _connected(self) -> Any:
        if self._connection is None:
            # Made in the running loop, to which it belongs.
            self._connection = connect_asyncio(self.url)
        return self._connection
