# SPDX-License-Identifier: Apache-2.0
"""Operations of web callers on one router, many at a time over one gRPC connection.

The operations are those of the clients. Messages are built and read here: NVIDIA's asyncio client
would double the core time of a request with a small image.
"""

import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import numpy as np

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.models.budget import number
from saccade.serving.client import operations
from saccade.serving.client.client import METADATA_S
from saccade.serving.client.connection import (
    SERVICE,
    ServerRefusedImage,
    channel_asyncio,
    explain,
    is_queue_full,
    is_unreachable,
)
from saccade.serving.client.embeddings import Embeddings
from saccade.serving.client.images import MAX_IMAGES
from saccade.serving.client.router_view import RouterView, view_of
from saccade.serving.client.wire import GRACE_S, Call, Steps, serialized
from saccade.serving.web.bodies import WebRefusal

VIEW_S = 10.0  # time after which the router's description is requested again
_LATE = "timeout ran out"
_LATER = re.compile(r"try again in about ([\d.]+) s")
_NUMBERS = count(1)
_T = TypeVar("_T")


@dataclass
class WebCaller:
    """A caller: its name, until when it waits, and the number of tokens in its texts.

    Units: deadline_s is in time.monotonic().
    """

    name: str
    timeout_s: float
    deadline_s: float
    trace: tuple[tuple[str, str], ...] = ()
    tokens: int = 0


@dataclass
class RouterCalls:
    """Runs operations on the router `model` of the server at `url`; belongs to one event loop."""

    url: str
    model: str
    _view: RouterView | None = None
    _viewed_s: float = -math.inf
    _methods: dict[str, Callable[..., Any]] = field(default_factory=dict)

    async def run(self, operation: Callable[[], Steps[_T]], caller: WebCaller) -> _T:
        """Run an operation, a second time if the server was replaced by one of another repository.

        Raises: WebRefusal with the status of the failure; SaccadeError for a wrong request.
        """
        try:
            return await self._run(operation(), caller)
        except ServerFailed:
            self._view = None
            return await self._run(operation(), caller)

    async def view(self) -> RouterView:
        """Return the router's description of itself, which may be some seconds old."""
        now = time.monotonic()
        if self._view is None or now - self._viewed_s > VIEW_S:
            self._viewed_s = now  # other callers use the old one meanwhile
            self._view = await self.look()
        return self._view

    async def look(self) -> RouterView:
        """Return the router's present description.

        Raises: WebRefusal if it does not answer.
        """
        from tritonclient.grpc import service_pb2

        request = service_pb2.ModelConfigRequest(name=self.model).SerializeToString()
        answer = await self._called("ModelConfig", request, METADATA_S, ())
        return view_of(service_pb2.ModelConfigResponse.FromString(answer), self.model)

    async def _run(self, steps: Steps[_T], caller: WebCaller) -> _T:
        try:
            wanted = next(steps)
            while True:
                answer = await (self.view() if wanted is None else self._answers(wanted, caller))
                wanted = steps.send(answer)
        except StopIteration as end:
            returned: _T = end.value
            return returned

    async def _answers(self, call: Call, caller: WebCaller) -> list[Any]:
        """Return the answers to a call, in requests of as many samples as one may have."""
        from tritonclient.grpc import InferResult, service_pb2

        if "tokens" in call.inputs:
            caller.tokens += np.count_nonzero(call.inputs["tokens"])
        results: list[Any] = []
        start = 0
        while start < call.rows:
            part = call.part(start, start + MAX_IMAGES)
            left_s = caller.deadline_s - time.monotonic()
            request_id = f"{caller.name}/{next(_NUMBERS)}"
            message = serialized(part, self.model, request_id, left_s)
            try:
                answer = await self._called("ModelInfer", message, left_s, caller.trace)
            except ServerRefusedImage as error:
                index = start + error.index
                raise ServerRefusedImage(error.where, error.reason, index, error.reason) from error
            results.append(InferResult(service_pb2.ModelInferResponse.FromString(answer)))
            start += part.rows
        return results

    async def _called(
        self, name: str, message: bytes, timeout_s: float, trace: tuple[tuple[str, str], ...]
    ) -> bytes:
        import grpc

        if not self._methods:
            channel = channel_asyncio(self.url)
            for method in ("ModelInfer", "ModelConfig"):
                self._methods[method] = channel.unary_unary(f"{SERVICE}/{method}")
        try:
            answer: bytes = await self._methods[name](
                message, timeout=max(0.0, timeout_s) + GRACE_S, metadata=trace or None
            )
        except grpc.aio.AioRpcError as error:
            raise _failure(error, self.model, timeout_s) from error
        return answer


def _failure(error: Any, model: str, timeout_s: float) -> SaccadeError:
    """Return the error to raise for a failed call of the router."""
    from tritonclient.utils import InferenceServerException

    said = InferenceServerException(error.details(), str(error.code()))
    explained = explain(said, "saccade", model, timeout_s)
    if is_unreachable(said):
        text = f"{model} is starting or being restarted. Try again in a second."
        return WebRefusal(text, 503, "unavailable", retry_after_s=1)
    if _LATE in error.details() or error.code().name == "DEADLINE_EXCEEDED":
        text = f"{model} did not answer in time. Allow more with the header X-Request-Timeout, in "
        return WebRefusal(f"{text}seconds, or name a smaller budget.", 504, "timeout")
    if is_queue_full(said):
        later = _LATER.search(error.details())
        wait_s = float(later[1]) if later else 1.0
        return WebRefusal(str(explained), 429, "rate_limit_exceeded", retry_after_s=wait_s)
    if not isinstance(explained, ServerFailed) and error.code().name != "NOT_FOUND":
        return explained
    return WebRefusal(str(explained), 503, "unavailable", retry_after_s=1)


def named_models(view: RouterView) -> dict[str, dict[str, str]]:
    """Return what each model of the list chooses: nothing, a budget or a policy."""
    known: dict[str, dict[str, str]] = {view.model: {}}
    known |= {f"{view.model}@{name}": {"budget": name} for name in map(view.budget, view.variants)}
    return known | {f"{view.model}@{name}": {"policy": name} for name in view.policies}


def choice_of(name: str, view: RouterView) -> dict[str, str]:
    """Return what a request's `model` chooses; also understood are other budgets, and `auto`.

    Raises: WebRefusal if there is no such model.
    """
    known = named_models(view)
    known |= {
        "auto": {},
        **{variant: {"budget": view.budget(variant)} for variant in view.variants},
    }
    for full in (name, f"{view.model}@{name}"):  # a policy or a budget may stand alone
        if full in known:
            return known[full]
    bare, at, budget = name.partition("@")
    if at and bare in (view.model, "auto"):
        with suppress(ValueError):
            number(budget)
            return {"budget": budget}
    text = f"model: found {name!r:.60}, expected {', '.join(known)} or {view.model}@BUDGET."
    raise WebRefusal(text, 404, "model_not_found", param="model")


def dimensions_of(view: RouterView) -> dict[str, int]:
    """Return the length of the embeddings of each variant, where the router's description has it.

    A code of slots has as many as the variant keeps, one after the other.
    """
    outputs = view.components[view.main_role]["outputs"]
    widths = {spec["name"]: spec["axes"].split()[-1] for spec in outputs}
    if widths.get("embedding", "").isdecimal():
        return dict.fromkeys(view.variants, int(widths["embedding"]))
    slots = {name: view.runtime_metadata(name).get("slots") for name in view.variants}
    if not widths.get("slots", "").isdecimal():
        return {}
    return {name: len(kept) * int(widths["slots"]) for name, kept in slots.items() if kept}


def embedded(
    inputs: list[str | bytes], chosen: dict[str, str], *, truncate: bool
) -> Steps[tuple[np.ndarray, Embeddings]]:
    """Return the embeddings of texts and images in one space, and those of the images or texts.

    Shapes: -> float32 [inputs d].
    """
    view: RouterView = yield None
    images = [item for item in inputs if isinstance(item, bytes)]
    texts = [item for item in inputs if isinstance(item, str)]
    budget, made = chosen.get("budget"), None
    if images:
        made = yield from operations.embed(images, budget, chosen.get("policy"))
        budget = view.budget(made.variant)
    elif "policy" in chosen:
        view.require_policies(embeds=True)
        budget = view.budget(view.space or "")
    if not texts:
        assert made is not None
        return made.vectors, made
    coded = yield from operations.embed_text(texts, budget, truncate)
    if made is None:
        return coded.vectors, coded
    coded.check_comparable(made)
    vectors = np.empty((len(inputs), made.vectors.shape[1]), np.float32)
    is_image = np.array([isinstance(item, bytes) for item in inputs])
    vectors[is_image], vectors[~is_image] = made.vectors, coded.vectors
    return vectors, made
