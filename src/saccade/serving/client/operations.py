# SPDX-License-Identifier: Apache-2.0
"""Operations of a client, step by step: the methods of the blocking and of the asyncio client.

An operation is a generator. It yields a call and is sent the server's answer, or yields None
and is sent the router's view; what it returns is what the caller asked for.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import update_wrapper
from typing import Any, TypeVar, get_args

import numpy as np

from saccade.errors import SaccadeError, ServerFailed
from saccade.serving.client.answers import (
    BY_POLICY,
    Caption,
    Classification,
    Segmentation,
    captions,
    classifications,
    classifications_by_policy,
    ranked,
    segmentations,
)
from saccade.serving.client.embeddings import Embeddings
from saccade.serving.client.images import Image, encoded
from saccade.serving.client.router_view import RouterView
from saccade.serving.client.text_tokens import check_words, question_tokens, text_tokens
from saccade.serving.client.wire import (
    Budget,
    Call,
    Steps,
    array_calls,
    choice,
    image_calls,
    made_by,
    output,
)
from saccade.serving.client.zero_shot import Labelling, probabilities

_T = TypeVar("_T")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_NAMES = ("variant", "variant_sha256")


def as_method(method: _Method, operation: Callable[..., Steps[Any]]) -> _Method:
    """A method with the name, the text and the signature of the operation that it runs."""
    own = inspect.signature(operation)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    update_wrapper(method, operation, assigned=("__name__", "__doc__"))
    method.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[first, *own.parameters.values()],
        return_annotation=get_args(own.return_annotation)[2],
    )
    return method


def classify(
    images: Sequence[Image] | np.ndarray,
    budget: Budget | None = None,
    min_score: float | None = None,
    max_latency_ms: float | None = None,
    top: int = 3,
    labels: Sequence[str] = (),
    templates: Sequence[str] = (),
    policy: str | None = None,
    max_risk: float | None = None,
    strict: bool = False,
) -> Steps[list[Classification]]:
    """The `top` labels of each image, by the variant that the one parameter chooses.

    By `policy`, or by the cheapest one that is certified for `max_risk`, an image goes on to the
    next variant until one is sure. Where a later one cannot be asked, the answer before is given
    as not certified; with `strict` the request is refused.

    Without `labels` they are the model's, or those it was deployed with. With them a model
    of image and text compares the image with each label in each template, such as
    "a photo of a {}".
    """
    parameters = choice(
        budget,
        min_score=min_score,
        max_latency_ms=max_latency_ms,
        policy=policy,
        max_risk=max_risk,
        strict=strict,
    )
    if labels and _follows(parameters):
        raise SaccadeError(
            "labels were given with a policy, which is certified for the labels of the repository. "
            "Leave one of them out."
        )
    if labels:
        labelling = Labelling(tuple(labels), tuple(templates))
        return _classify_as(images, labelling, parameters, top)
    if templates:
        raise SaccadeError("templates were given without labels. Give both, or neither.")
    _check_top(top)
    return _classify(images, parameters, top)


def embed(images: Sequence[Image] | np.ndarray, budget: Budget | None = None) -> Steps[Embeddings]:
    """One vector an image, all of the same variant.

    Shapes: vectors float32 [n d].
    """
    return _embed_images(images, choice(budget))


def embed_text(
    texts: Sequence[str], budget: Budget | None = None, truncate: bool = False
) -> Steps[Embeddings]:
    """One vector a text, all of the same variant; long texts are cut only if asked to.

    Shapes: vectors float32 [n d].
    """
    parameters = choice(budget)
    view: RouterView = yield None
    tokens = text_tokens(texts, _first(view), truncate=truncate)
    return (yield from _embed_tokens(tokens, view, parameters))


def segment(
    images: Sequence[Image] | np.ndarray,
    budget: Budget | None = None,
    seed: int = 0,
    slots: int | None = None,
) -> Steps[list[Segmentation]]:
    """The slots of each image; `seed` and the image's place in its request draw their start.

    A request takes up to 64 images: with the 65th the places begin anew.
    """
    parameters = choice(budget) | {"seed": str(seed)}
    if slots is not None:
        parameters["slots"] = str(slots)
    view: RouterView = yield None
    view.require("segment", "segmenting")
    wanted = ("masks", "slots", "positions", "scales", "reconstruction")
    names = tuple(name for name in wanted if name in view.outputs(""))
    calls = image_calls(images, (*names, "variant"), parameters)
    return (yield from _all_of(calls, lambda result: segmentations(result, names)))


def answer(
    images: Sequence[Image] | np.ndarray | Mapping[str, np.ndarray],
    questions: Sequence[str],
    budget: Budget | None = None,
    top: int = 3,
    truncate: bool = False,
    strict: bool = False,
    policy: str | None = None,
    max_risk: float | None = None,
) -> Steps[list[Classification]]:
    """The `top` answers to each question on the image of the same place.

    In place of images the features that the model takes, by name, where it takes features.
    A question that is too long is cut where `truncate` says so, else refused. Words that the model
    does not know are all one word to it; with `strict` a question that has any is refused. A policy
    is followed as by `classify`; with `strict` an answer that is not certified is refused, too.
    """
    by_policy = policy is not None or max_risk is not None
    parameters = choice(budget, policy=policy, max_risk=max_risk, strict=strict and by_policy)
    _check_top(top)
    view: RouterView = yield None
    view.require("answer", "answering")
    if strict:
        check_words(questions, _first(view))
    tokens = question_tokens(questions, _first(view), truncate=truncate)
    arrays = as_arrays({"question": tokens, **_by_name(images)}, view)
    names, read = _labels_asked(parameters, view)
    calls = array_calls(arrays, names, parameters, top=top)
    return (yield from _all_of(calls, read))


def caption(
    images: Sequence[Image] | np.ndarray | Mapping[str, np.ndarray],
    budget: Budget | None = None,
    beam: int | None = None,
    max_length: int | None = None,
    end: str | None = None,
) -> Steps[list[Caption]]:
    """A sentence for each image, by a search of `beam` sentences at a time.

    Units: max_length is words; `end` is the word that ends a sentence.
    """
    given = {"beam": beam, "max_length": max_length, "end": end}
    own = {name: str(value) for name, value in given.items() if value is not None}
    parameters = choice(budget) | own
    view: RouterView = yield None
    view.require("caption", "captioning")
    arrays = as_arrays(_by_name(images), view)
    calls = array_calls(arrays, ("caption", "attention", "variant"), parameters)
    return (yield from _all_of(calls, captions))


def infer(
    inputs: Mapping[str, Any],
    outputs: Sequence[str] | None = None,
    budget: Budget | None = None,
    parameters: Mapping[str, str] | None = None,
) -> Steps[dict[str, np.ndarray]]:
    """Whatever the model takes and answers, by name: arrays, and images where it takes some.

    Shapes: every array has the samples as its first axis, of which there are the same number.
    """
    asked = choice(budget) | dict(parameters or {})
    view: RouterView = yield None
    results = yield from _results(array_calls(as_arrays(inputs, view), outputs, asked))
    names = outputs or [tensor.name for tensor in results[0].get_response().outputs]
    return {name: np.concatenate([output(result, name) for result in results]) for name in names}


def as_arrays(inputs: Mapping[str, Any], view: RouterView) -> dict[str, np.ndarray]:
    """The inputs of a request as the router takes them: images encoded, numbers of its types.

    Raises: SaccadeError for an input that the router does not have.
    """
    dtypes = view.dtypes()
    if unknown := sorted(set(inputs) - set(dtypes)):
        raise SaccadeError(
            f"{view.model} has no input {unknown[0]!r}; it takes {', '.join(sorted(dtypes))}."
        )
    arrays = {}
    for name, given in inputs.items():
        if dtypes[name] == "string":
            arrays[name] = np.array(encoded(given), dtype=object).reshape(-1, 1)
            continue
        array = np.asarray(given)
        if not np.can_cast(array.dtype, dtypes[name], "same_kind"):
            raise SaccadeError(f"{name} holds {array.dtype}, expected {dtypes[name]}. Convert it.")
        array = array.astype(dtypes[name])
        # A number a sample is a column of one number for the server.
        arrays[name] = array[:, None] if array.ndim == 1 else array
    return arrays


def _classify(
    images: Sequence[Image] | np.ndarray, parameters: Mapping[str, str], top: int
) -> Steps[list[Classification]]:
    files = encoded(images)  # what is no image needs no server to be refused
    view: RouterView = yield None
    view.require_output("probabilities", "classify images")
    names, read = _labels_asked(parameters, view)
    calls = image_calls(files, names, parameters, top=top)
    return (yield from _all_of(calls, read))


def _follows(parameters: Mapping[str, str]) -> bool:
    return not parameters.keys().isdisjoint({"policy", "max_risk"})


def _labels_asked(
    parameters: Mapping[str, str], view: RouterView
) -> tuple[tuple[str, ...], Callable[[Any], list[Classification]]]:
    """The outputs that a request for labels asks for, and what reads its answer.

    Raises: SaccadeError for a policy of a router that has none.
    """
    names = ("probabilities", "variant")
    if not _follows(parameters):
        return names, classifications
    view.require_policies()
    return (*names, *BY_POLICY), classifications_by_policy


def _classify_as(
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
            f"{view.model}: a model of family {view.family} without a text component; labels need "
            "one. Leave them out, or name a model with image and text."
        )
    coded = yield from _embed_images(images, parameters)
    metadata = view.runtime_metadata(coded.variant)
    labelling = labelling.of(metadata)
    tokens = text_tokens(labelling.prompts(), metadata)
    texts = yield from _embed_tokens(tokens, view, choice(view.budget(coded.variant)))
    texts.check_comparable(coded)
    chances = probabilities(coded.vectors, labelling.vectors(texts.vectors), metadata)
    return ranked(chances, labelling.labels, top, coded.variant)


def _embed_images(
    images: Sequence[Image] | np.ndarray, parameters: Mapping[str, str]
) -> Steps[Embeddings]:
    files = encoded(images)
    view: RouterView = yield None
    view.require_output("embedding", "embed images")
    calls = image_calls(files, ("embedding", *_NAMES), parameters)
    return _joined((yield from _results(calls)), view)


def _embed_tokens(
    tokens: np.ndarray, view: RouterView, parameters: Mapping[str, str]
) -> Steps[Embeddings]:
    calls = array_calls({"tokens": tokens}, ("embedding", *_NAMES), parameters)
    return _joined((yield from _results(calls)), view)


def _all_of(calls: Iterable[Call], read: Callable[[Any], list[_T]]) -> Steps[list[_T]]:
    """Values that are read of the answer to each call."""
    answers: list[_T] = []
    for call in calls:
        answers += read((yield call))
    return answers


def _results(calls: Iterable[Call]) -> Steps[list[Any]]:
    return _all_of(calls, lambda result: [result])


def _by_name(
    images: Sequence[Image] | np.ndarray | Mapping[str, np.ndarray],
) -> Mapping[str, Any]:
    return images if isinstance(images, Mapping) else {"image": images}


def _joined(results: Sequence[Any], view: RouterView) -> Embeddings:
    variant, sha256 = made_by(results)
    if variant not in view.variants:
        raise ServerFailed(
            f"{view.model} answered by {variant}, which it did not have when this client "
            "connected. Connect again."
        )
    vectors = np.concatenate([output(result, "embedding") for result in results])
    return Embeddings(
        vectors, variant, sha256, view.runtime_metadata(variant).get("slots_sha256", "")
    )


def _first(view: RouterView) -> dict[str, Any]:
    return view.runtime_metadata(view.variants[0])


def _check_top(top: int) -> None:
    if not 1 <= top <= 100_000:
        raise SaccadeError(f"top is {top}, expected 1 or more labels an image.")
