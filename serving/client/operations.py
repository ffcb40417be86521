# SPDX-License-Identifier: Apache-2.0
"""What a client does, step by step: the same for the blocking and the asyncio client.

An operation is a generator. It yields a call and is sent the server's answer, or yields None
and is sent the router's view; what it returns is what the caller asked for.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from saccade.errors import SaccadeError, ServerFailed
from saccade.serving.client.answers import (
    Caption,
    Classification,
    Segmentation,
    captions,
    classifications,
    ranked,
    segmentations,
)
from saccade.serving.client.embeddings import Embeddings
from saccade.serving.client.images import Image, encoded
from saccade.serving.client.router_view import RouterView
from saccade.serving.client.text_tokens import question_tokens, text_tokens
from saccade.serving.client.wire import Call, array_calls, choice, image_calls, made_by, output
from saccade.serving.client.zero_shot import Labelling, probabilities

_T = TypeVar("_T")
Steps = Generator[Call | None, Any, _T]
_NAMES = ("variant", "variant_sha256")


def classify(
    images: Sequence[Image] | np.ndarray, parameters: Mapping[str, str], top: int
) -> Steps[list[Classification]]:
    """The best labels of each image, of those that the model or the repository has."""
    _check_top(top)
    found = []
    for call in image_calls(images, ("probabilities", "variant"), parameters, top=top):
        found += classifications((yield call))
    return found


def classify_as(
    images: Sequence[Image] | np.ndarray,
    labelling: Labelling,
    parameters: Mapping[str, str],
    top: int,
) -> Steps[list[Classification]]:
    """The best of the given labels for each image: both towers of one variant are asked."""
    _check_top(top)
    view: RouterView = yield None
    if "tokens" not in view.inputs("text"):
        raise SaccadeError(
            f"{view.model}: a model of family {view.family} without a text part; labels need one. "
            "Leave them out, or name a model with image and text."
        )
    coded = yield from embed(images, parameters)
    facts = view.facts(coded.variant)
    labelling = labelling.of(facts)
    tokens = text_tokens(labelling.prompts(), facts)
    texts = yield from _embed_tokens(tokens, view, coded.variant)
    texts.check_comparable(coded)
    chances = probabilities(coded.vectors, labelling.vectors(texts.vectors), facts)
    return ranked(chances, labelling.labels, top, coded.variant)


def embed(images: Sequence[Image] | np.ndarray, parameters: Mapping[str, str]) -> Steps[Embeddings]:
    """One vector an image, all of the same variant."""
    results = []
    for call in image_calls(images, ("embedding", *_NAMES), parameters):
        results.append((yield call))
    view: RouterView = yield None
    return _joined(results, view)


def embed_text(
    texts: Sequence[str], parameters: Mapping[str, str], truncate: bool
) -> Steps[Embeddings]:
    """One vector a text, all of the same variant."""
    view: RouterView = yield None
    facts = view.facts(view.variants[0])
    tokens = text_tokens(texts, facts, truncate=truncate)
    results = []
    for call in array_calls({"tokens": tokens}, ("embedding", *_NAMES), parameters):
        results.append((yield call))
    return _joined(results, view)


def segment(
    images: Sequence[Image] | np.ndarray,
    parameters: Mapping[str, str],
    seed: int,
    slots: int | None,
) -> Steps[list[Segmentation]]:
    """The slots of each image."""
    view: RouterView = yield None
    view.require("segment", "segmenting")
    wanted = ("masks", "slots", "positions", "scales", "reconstruction")
    names = tuple(name for name in wanted if name in view.outputs(""))
    drawn = {"seed": str(seed)} | ({} if slots is None else {"slots": str(slots)})
    found = []
    for call in image_calls(images, (*names, "variant"), {**parameters, **drawn}):
        found += segmentations((yield call), names)
    return found


def answer(
    images: Sequence[Image] | np.ndarray | Mapping[str, np.ndarray],
    questions: Sequence[str],
    parameters: Mapping[str, str],
    top: int,
    truncate: bool,
) -> Steps[list[Classification]]:
    """The best answers to each question on the image, or features, of the same place."""
    _check_top(top)
    view: RouterView = yield None
    view.require("answer", "answering")
    tokens = question_tokens(questions, _first(view), truncate=truncate)
    inputs: dict[str, Any] = {"question": tokens}
    inputs |= images if isinstance(images, Mapping) else {"image": images}
    arrays = as_arrays(inputs, view)
    found = []
    for call in array_calls(arrays, ("probabilities", "variant"), parameters, top=top):
        found += classifications((yield call))
    return found


def caption(
    images: Sequence[Image] | np.ndarray | Mapping[str, np.ndarray],
    parameters: Mapping[str, str],
) -> Steps[list[Caption]]:
    """A sentence for each image, or for its features."""
    view: RouterView = yield None
    view.require("caption", "captioning")
    arrays = as_arrays(images if isinstance(images, Mapping) else {"image": images}, view)
    found = []
    for call in array_calls(arrays, ("caption", "attention", "variant"), parameters):
        found += captions((yield call))
    return found


def infer(
    inputs: Mapping[str, Any], outputs: Sequence[str] | None, parameters: Mapping[str, str]
) -> Steps[dict[str, np.ndarray]]:
    """Whatever a model takes and answers, by name."""
    view: RouterView = yield None
    results = []
    for call in array_calls(as_arrays(inputs, view), outputs, parameters):
        results.append((yield call))
    names = outputs or [each.name for each in results[0].get_response().outputs]
    return {name: np.concatenate([output(each, name) for each in results]) for name in names}


def as_arrays(inputs: Mapping[str, Any], view: RouterView) -> dict[str, np.ndarray]:
    """The inputs of a request as the router takes them: images encoded, numbers of its types.

    Raises: SaccadeError for an input that the router does not have.
    """
    dtypes = view.dtypes()
    if unknown := sorted(set(inputs) - set(dtypes)):
        raise SaccadeError(
            f"{view.model} has no input {unknown[0]!r}; it takes {', '.join(sorted(dtypes))}."
        )
    found = {}
    for name, given in inputs.items():
        if dtypes[name] == "string":
            found[name] = np.array(encoded(given), dtype=object).reshape(-1, 1)
            continue
        array = np.asarray(given)
        if not np.can_cast(array.dtype, dtypes[name], "same_kind"):
            raise SaccadeError(f"{name} holds {array.dtype}, expected {dtypes[name]}. Convert it.")
        array = array.astype(dtypes[name])
        # A number a sample is a column of one number for the server.
        found[name] = array[:, None] if array.ndim == 1 else array
    return found


def _embed_tokens(tokens: np.ndarray, view: RouterView, variant: str) -> Steps[Embeddings]:
    """The codes of texts by that variant."""
    parameters = choice(view.setting(variant))
    results = []
    for call in array_calls({"tokens": tokens}, ("embedding", *_NAMES), parameters):
        results.append((yield call))
    return _joined(results, view)


def _joined(results: Sequence[Any], view: RouterView) -> Embeddings:
    variant, sha256 = made_by(results)
    if variant not in view.variants:
        raise ServerFailed(
            f"{view.model} answered by {variant}, which it did not have when this client "
            "connected. Connect again."
        )
    vectors = np.concatenate([output(result, "embedding") for result in results])
    return Embeddings(vectors, variant, sha256, view.facts(variant).get("slots_sha256", ""))


def _first(view: RouterView) -> dict[str, Any]:
    return view.facts(view.variants[0])


def _check_top(top: int) -> None:
    if not 1 <= top <= 100_000:
        raise SaccadeError(f"top is {top}, expected 1 or more labels an image.")
