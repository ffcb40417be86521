# SPDX-License-Identifier: Apache-2.0
"""Ask a running server: labels, embeddings, slots, answers, captions, and anything else."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from saccade.errors import SaccadeError
from saccade.serving.client import operations
from saccade.serving.client.answers import Caption, Classification, Segmentation
from saccade.serving.client.connection import connect
from saccade.serving.client.editing import Change, edit
from saccade.serving.client.embeddings import (
    Embeddings,
    check_embeddings_file,
    load_embeddings,
    save_embeddings,
)
from saccade.serving.client.images import Image
from saccade.serving.client.operations import Steps
from saccade.serving.client.probe import Prober
from saccade.serving.client.readiness import Board, Readiness
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
        self._view: RouterView | None = None

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
            return self._run(operations.classify(images, parameters, top))
        labelling = Labelling(tuple(labels), tuple(templates))
        steps = operations.classify_as(images, labelling, parameters, top)
        return self._run(steps)

    def embed(
        self, images: Sequence[Image] | np.ndarray, budget: Budget | None = None
    ) -> Embeddings:
        """One vector an image, all of the same variant.

        Shapes: vectors float32 [n d].
        """
        return self._run(operations.embed(images, choice(budget)))

    def embed_text(
        self,
        texts: Sequence[str],
        budget: Budget | None = None,
        truncate: bool = False,
    ) -> Embeddings:
        """One vector a text, all of the same variant; long texts are cut only if asked to.

        Shapes: vectors float32 [n d].
        """
        return self._run(operations.embed_text(texts, choice(budget), truncate))

    def segment(
        self,
        images: Sequence[Image] | np.ndarray,
        budget: Budget | None = None,
        seed: int = 0,
        slots: int | None = None,
    ) -> list[Segmentation]:
        """The slots of each image; `seed` and the image's place in its request draw their start.

        A request takes up to 64 images: with the 65th the places begin anew.
        """
        return self._run(operations.segment(images, choice(budget), seed, slots))

    def edit(self, image: Image, change: Change, budget: Budget | None = None) -> np.ndarray:
        """The image with one slot moved, scaled or left out, as the model draws it.

        Shapes: -> uint8 [h w c].
        """
        return self._run(edit(image, change, choice(budget)))

    def answer(
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
        return self._run(steps)

    def caption(
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
        return self._run(operations.caption(images, choice(budget) | own))

    def infer(
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
        return self._run(operations.infer(inputs, outputs, asked))

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
        """What the router tells of itself; asked for once."""
        if self._view is None:
            self._view = self._look()
        return self._view

    def _run(self, steps: Steps[_T]) -> _T:
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(self.view() if wanted is None else self._infer(wanted))
        except StopIteration as end:
            found: _T = end.value
            return found

    def _look(self) -> RouterView:
        from tritonclient.utils import InferenceServerException

        try:
            config = self._connection.get_model_config(self.model, client_timeout=self.timeout_s)
        except InferenceServerException as error:
            raise explain(error, self.url, self.model, self.timeout_s) from error
        return view_of(config, self.model)

    def _infer(self, call: Call) -> Any:
        from tritonclient.utils import InferenceServerException

        try:
            return self._connection.infer(self.model, **with_deadline(call, self.timeout_s))
        except InferenceServerException as error:
            raise explain(error, self.url, self.model, self.timeout_s) from error
