# SPDX-License-Identifier: Apache-2.0
"""Requests from the page of `saccade explore` to the served model, independent of the browser."""

import base64
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from saccade.exporter.artefact.frontier import Frontier
from saccade.models.attention_maps import Drawing, ShowRequest
from saccade.models.families import entry_of
from saccade.serving.client.answers import Classification, Segmentation
from saccade.serving.client.call_options import ShowOptions
from saccade.serving.client.client import Change, Client
from saccade.serving.commands.calls import drawing_of
from saccade.serving.commands.pictures import image_png, maps_png, read_pixels

MAX_BYTES = 64 * 2**20  # size limit of an upload: the most that a client sends in one request
TOP = 5  # labels or answers that the page lists
_TIMED = 3  # calls whose median latency is shown
_SLOW_S = 1.0  # a call that takes longer is not repeated to time it
_SEEN = 0.01  # share of the image: a slot with fewer pixels is not counted
_T = TypeVar("_T")


@dataclass(frozen=True)
class ExploreServer:
    """Server behind the page, and what is known about its artefact."""

    url: str
    models: tuple[str, ...]
    frontier: Frontier | None = None  # None: nothing was measured
    examples: tuple[bytes, ...] = field(default=(), repr=False)  # images, as PNG


@dataclass(frozen=True)
class ExploreRequest:
    """One image and the request about it.

    `text` is a question or a comma-separated list of labels, depending on the model.
    """

    image: bytes
    budget: str
    text: str = ""
    seed: int = 0


@dataclass(frozen=True)
class BudgetReply:
    """Answer at one budget: lines with their probability or share, and the latency.

    Units: latency_ms is the median of a few calls over gRPC, one at a time.
    """

    budget: str
    variant: str
    lines: tuple[tuple[str, float | None], ...]
    best: str  # the answer in a few words
    confidence: float | None  # None if the model gives no probability
    latency_ms: float


class Explorer:
    """Client of one router that sends one image at a time; concurrent calls wait their turn."""

    def __init__(self, url: str, model: str, timeout_s: float | None) -> None:
        self._client = Client(url, model, timeout_s)
        self._lock = threading.Lock()
        self.model = model
        self.view = self._client.view()
        self._calls = entry_of(self.view.family).calls
        self.view.image_size()  # refuse a model that takes no image

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    @property
    def budgets(self) -> tuple[str, ...]:
        """Budgets that a request can choose, smallest first."""
        named = dict.fromkeys(self.view.budget(variant) for variant in self.view.variants)
        return tuple(reversed(named))

    def title(self, budget: str) -> str:
        """Return a budget as people write it: 0.5 for b0500, others by name."""
        is_share = budget.startswith("b") and budget[1:].isdigit()
        return f"{int(budget[1:]) / 1000:g}" if is_share else budget

    @property
    def asks_question(self) -> bool:
        """True if a request needs a question as well as an image."""
        return "answer" in self._calls

    @property
    def takes_labels(self) -> bool:
        """True if a request may contain labels to compare the image with."""
        return "tokens" in self.view.inputs("text")

    @property
    def edits_slots(self) -> bool:
        """True if the model can draw an image with changed slots."""
        return "edit" in self._calls and "decode" in self.view.components

    @property
    def words(self) -> tuple[str, ...]:
        """Words that the model knows, if it has a list of them."""
        return tuple(self.view.runtime_metadata(self.view.variants[0]).get("words") or ())

    def missing(self, text: str) -> str:
        """Return a sentence about an input that is still missing; empty if none is."""
        if self.asks_question and not text.strip():
            return "Type a question about the image."
        return ""

    def answer(self, request: ExploreRequest) -> BudgetReply:
        """Answer a request and time it.

        Raises: SaccadeError if the image or the text cannot be used; ServerFailed.
        """
        with self._lock:
            reply, latency_ms = _timed(lambda: self._asked(request))
        return replace(reply, latency_ms=latency_ms)

    def at_every_budget(self, request: ExploreRequest) -> list[BudgetReply]:
        """Answer the same request at every budget, smallest first."""
        return [self.answer(replace(request, budget=budget)) for budget in self.budgets]

    def picture(self, request: ExploreRequest) -> bytes:
        """Return a PNG of what the model looked at, as `saccade show` draws it.

        Raises: SaccadeError if the model has nothing to show.
        """
        options = ShowOptions(self.model, request.budget, question=request.text, seed=request.seed)
        pixels = read_pixels(request.image)
        with self._lock:
            shown = drawing_of(ShowRequest(self._client, self.view, request.image, pixels, options))
        return shown.png if isinstance(shown, Drawing) else maps_png([shown], pixels)

    def segment(self, request: ExploreRequest) -> Segmentation:
        """Return the slots of the image."""
        with self._lock:
            (found,) = self._client.segment([request.image], request.budget, request.seed)
        return found

    def edit(self, request: ExploreRequest, change: Change) -> bytes:
        """Return a PNG of the image with one slot changed, as the model draws it.

        Raises: SaccadeError if the model cannot make this change.
        """
        with self._lock:
            return image_png(self._client.edit(request.image, change, request.budget))

    def _asked(self, request: ExploreRequest) -> BudgetReply:
        image, budget, client = [request.image], request.budget, self._client
        if "answer" in self._calls:
            (answer,) = client.answer(image, [request.text], budget, TOP)
            return _labelled(answer, budget)
        if "caption" in self._calls:
            (caption,) = client.caption(image, budget)
            return _text(caption.text, caption.variant, budget)
        if "segment" in self._calls:
            (found,) = client.segment(image, budget, request.seed)
            return _shares(found, budget)
        labels = [label.strip() for label in request.text.split(",") if label.strip()]
        if self.takes_labels and not labels and not self.view.labels:
            coded = client.embed(image, budget)
            return _text(f"an embedding of {coded.vectors.shape[1]} numbers", coded.variant, budget)
        (best,) = client.classify(image, budget, top=TOP, labels=labels)
        return _labelled(best, budget)


def data_url(image: bytes) -> str:
    """Return an image file as a URL that contains it."""
    kinds = {b"\x89PN": "png", b"\xff\xd8\xff": "jpeg", b"RIF": "webp"}
    kind = kinds.get(image[:3], "png")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def _labelled(answer: Classification, budget: str) -> BudgetReply:
    best, confidence = answer.labels[0]
    return BudgetReply(budget, answer.variant, tuple(answer.labels), best, confidence, 0.0)


def _text(text: str, variant: str, budget: str) -> BudgetReply:
    return BudgetReply(budget, variant, ((text, None),), text, None, 0.0)


def _shares(found: Segmentation, budget: str) -> BudgetReply:
    shares = [float(np.mean(found.owners == slot)) for slot in range(len(found.masks))]
    lines = tuple((f"slot {slot}", share) for slot, share in enumerate(shares))
    seen = sum(share > _SEEN for share in shares)
    return BudgetReply(budget, found.variant, lines, f"{seen} slots with pixels", None, 0.0)


def _timed(call: Callable[[], _T]) -> tuple[_T, float]:
    seconds: list[float] = []
    while len(seconds) < _TIMED:
        began = time.perf_counter()
        answer = call()
        seconds.append(time.perf_counter() - began)
        if seconds[-1] > _SLOW_S:
            break
    return answer, 1000 * statistics.median(seconds)
