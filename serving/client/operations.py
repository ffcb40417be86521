# SPDX-License-Identifier: Apache-2.0
"""Operations that become methods of both the blocking and the asyncio client.

An operation is a generator. It yields a call and receives the server's answers, one for each
request that the call was split into, or yields None and receives the router's view. It returns the
result for the caller.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, TypeVar, get_args

import numpy as np

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.models.slot_attention.edit import edited_state, painted
from saccade.serving.client.answers import (
    BY_LOAD,
    BY_POLICY,
    Caption,
    Classification,
    Segmentation,
    captions,
    classifications,
    ranked,
    segmentations,
)
from saccade.serving.client.embeddings import Embeddings
from saccade.serving.client.images import Image
from saccade.serving.client.router_view import RouterView
from saccade.serving.client.texts import (
    Labelling,
    check_words,
    probabilities,
    question_tokens,
    text_tokens,
)
from saccade.serving.client.wire import (
    OBJECTIVE,
    Budget,
    Call,
    Steps,
    array_call,
    choice,
    image_input,
    made_by,
    makers,
    names_variant,
    output,
)

_T = TypeVar("_T")
_Method = TypeVar("_Method", bound=Callable[..., Any])
_NAMES, _LABELS = ("variant", "variant_sha256"), ("probabilities", "variant")


@dataclass(frozen=True)
class Change:
    """Change to one slot of an image.

    Units: `move` (y, x) is added to the slot's position, in halves of the image; `scale`
           multiplies its size.
    """

    slot: int
    move: tuple[float, float] = (0.0, 0.0)
    scale: float = 1.0
    remove: bool = False
    seed: int = 0  # determines where the slots start, as for `segment`
    slots: int | None = None  # number of slots; default: as in training


def as_method(method: _Method, operation: Callable[..., Steps[Any]]) -> _Method:
    """Give a method the name, docstring and signature of the operation that it runs."""
    own = inspect.signature(operation)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    update_wrapper(method, operation, assigned=("__name__", "__doc__"))
    method.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[first, *own.parameters.values()],
        return_annotation=get_args(own.return_annotation)[2],
    )
    return method


def finished(steps: Steps[_T], view: Callable[[], RouterView], infer: Callable[[Call], Any]) -> _T:
    """Run the requests of an operation to their end: `infer` answers them."""
    try:
        wanted = next(steps)
        while True:
            try:
                answer = view() if wanted is None else infer(wanted)
            except SaccadeError as error:
                wanted = steps.throw(error)
            else:
                wanted = steps.send(answer)
    except StopIteration as end:
        returned: _T = end.value
        return returned


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
    """Return the `top` most probable labels of each image.

    At most one of `budget`, `min_score`, `max_latency_ms`, `policy` and `max_risk` chooses who
    answers. With `policy`, or the cheapest policy that is certified for `max_risk`, each image goes
    on to the next variant until one is confident. If a later variant cannot answer, the answer of
    the one before is returned as not certified; with `strict`, the request is refused. With one of
    these, or in a repository with --slo-ms, `max_latency_ms` is an objective instead: the request
    is answered within this time, with less compute under load.

    Without `labels`, the labels are the model's own or those it was deployed with. With `labels`, a
    model of images and text compares each image with each label in each template, such as
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
            "Found labels together with a policy, which is certified for the labels of the "
            "repository. Pass only one of them."
        )
    if labels:
        labelling = Labelling(tuple(labels), tuple(templates))
        return _classify_as(images, labelling, parameters, top)
    if templates:
        raise SaccadeError("Found templates without labels. Pass both or neither.")
    _check_top(top)
    return _classify(images, parameters, top)


def embed(
    images: Sequence[Image] | np.ndarray,
    budget: Budget | None = None,
    policy: str | None = None,
    max_risk: float | None = None,
    max_latency_ms: float | None = None,
    strict: bool = False,
    space: str | None = None,
) -> Steps[Embeddings]:
    """Return one embedding per image, all in the space of one variant.

    This is the variant that computed them. With a policy, and in a repository with --slo-ms that
    has policies of embeddings, several variants compute them and all are in the full model's space;
    parameters work as in `classify`. `space` is the budget or name of another variant: the
    embeddings are mapped into its space, to search an index of its vectors.

    Shapes: vectors float32 [n d].
    """
    parameters = choice(
        budget,
        policy=policy,
        max_risk=max_risk,
        max_latency_ms=max_latency_ms,
        strict=strict,
    )
    if space is not None and (_follows(parameters) or OBJECTIVE in parameters):
        raise SaccadeError(
            f"Found a space, {space!r:.60}, together with a policy or a latency, whose embeddings "
            "are in the full model's space. Pass only one of them."
        )
    return _embed_images(images, parameters, space, by_policy=True)


def embed_text(
    texts: Sequence[str], budget: Budget | None = None, truncate: bool = False
) -> Steps[Embeddings]:
    """Return one embedding per text, all from the same variant.

    A text that is too long is cut if `truncate` is true, and refused otherwise.

    Shapes: vectors float32 [n d].
    """
    parameters = choice(budget)
    view: RouterView = yield None
    tokens = text_tokens(texts, _first(view), truncate=truncate)
    return (yield from _embeddings({"tokens": tokens}, view, parameters))


def segment(
    images: Sequence[Image] | np.ndarray,
    budget: Budget | None = None,
    seed: int = 0,
    slots: int | None = None,
    policy: str | None = None,
    max_risk: float | None = None,
    strict: bool = False,
) -> Steps[list[Segmentation]]:
    """Return the slots of each image.

    `seed` and the index of the image in the list determine where the slots start; the index starts
    again at 0 with the 65th image. Policies work as in `classify`; they are certified for the
    number of slots of the training, so not with `slots`.
    """
    followed = choice(budget, policy=policy, max_risk=max_risk, strict=strict)
    parameters = followed | {"seed": str(seed)}
    if slots is not None and _follows(followed):
        raise SaccadeError(
            f"Found --slots {slots} together with a policy, which is certified for the number of "
            "slots of the training. Pass only one of them."
        )
    if slots is not None:
        parameters["slots"] = str(slots)
    view: RouterView = yield None
    view.require("segment", "segmenting")
    wanted = ("masks", "slots", "positions", "scales", "reconstruction")
    names = tuple(name for name in wanted if name in view.outputs(""))
    if _follows(followed):
        view.require_policies()
        names = (*names, *BY_POLICY)
    inputs = {"image": image_input(images)}
    call = array_call(inputs, (*names, "variant"), parameters, first_row=view.first_row)
    return _read((yield call), lambda result: segmentations(result, names))


def edit(image: Image, change: Change, budget: Budget | None = None) -> Steps[np.ndarray]:
    """Return the image with one slot moved, scaled or removed, as the model draws it.

    Shapes: -> uint8 [h w c].
    Raises: SaccadeError if there is no such slot, or the model cannot make this change.
    """
    parameters = choice(budget)
    view: RouterView = yield None
    view.require("edit", "editing")
    names = view.inputs("decode")
    drawn = {"seed": str(change.seed)}
    drawn |= {} if change.slots is None else {"slots": str(change.slots)}
    (first,) = yield array_call(
        {"image": image_input([image])}, (*names, "variant"), parameters | drawn
    )
    state = {name: output(first, name) for name in names}
    changed = edited_state(
        state, slot=change.slot, move=change.move, scale=change.scale, remove=change.remove
    )
    (drawing,) = yield array_call(changed, ("reconstruction",), parameters)
    return painted(output(drawing, "reconstruction")[0])


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
    """Return the `top` most probable answers to each question about the image at the same index.

    For a model that takes features, pass arrays by name instead of images. A question that is too
    long is cut if `truncate` is true, and refused otherwise. All words that the model does not
    know are the same word to it; with `strict`, a question that contains any is refused. Policies
    work as in `classify`; with `strict`, the request is also refused if an answer would not be
    certified.
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
    marks = _marks_asked(parameters, view)
    answers = yield array_call(arrays, (*_LABELS, *marks), parameters, top=top)
    return _read(answers, partial(classifications, marks=marks))


def caption(
    images: Sequence[Image] | np.ndarray | Mapping[str, np.ndarray],
    budget: Budget | None = None,
    beam: int | None = None,
    max_length: int | None = None,
    end: str | None = None,
) -> Steps[list[Caption]]:
    """Return a sentence for each image, found by a beam search that keeps `beam` sentences.

    `end` is the word that ends a sentence.
    Units: max_length is in words.
    """
    given = {"beam": beam, "max_length": max_length, "end": end}
    own = {name: str(value) for name, value in given.items() if value is not None}
    parameters = choice(budget) | own
    view: RouterView = yield None
    view.require("caption", "captioning")
    arrays = as_arrays(_by_name(images), view)
    return _read(
        (yield array_call(arrays, ("caption", "attention", "variant"), parameters)), captions
    )


def infer(
    inputs: Mapping[str, Any],
    outputs: Sequence[str] | None = None,
    budget: Budget | None = None,
    parameters: Mapping[str, str] | None = None,
) -> Steps[dict[str, np.ndarray]]:
    """Send any inputs and return any outputs of the model, by name.

    Inputs are arrays, and images if the model takes images.
    Shapes: the first axis of every array is the samples, of which all have the same number.
    """
    asked = choice(budget) | dict(parameters or {})
    view: RouterView = yield None
    arrays = as_arrays(inputs, view)
    results = yield array_call(arrays, outputs, asked, first_row=view.first_row)
    names = outputs or [tensor.name for tensor in results[0].get_response().outputs]
    return {name: np.concatenate([output(result, name) for result in results]) for name in names}


def as_arrays(inputs: Mapping[str, Any], view: RouterView) -> dict[str, np.ndarray]:
    """Convert inputs to what the router takes: encoded images, and numbers of its types.

    Raises: SaccadeError for an input that the router does not have.
    """
    dtypes = view.dtypes()
    if unknown := sorted(set(inputs) - set(dtypes)):
        raise SaccadeError(
            f"{view.model} has no input {unknown[0]!r}. It takes {', '.join(sorted(dtypes))}."
        )
    arrays = {}
    for name, given in inputs.items():
        if dtypes[name] == "string":
            arrays[name] = image_input(given)
            continue
        array = np.asarray(given)
        if not np.can_cast(array.dtype, dtypes[name], "same_kind"):
            raise SaccadeError(
                f"{name}: found type {array.dtype}, expected {dtypes[name]}. Convert it."
            )
        array = array.astype(dtypes[name])
        # For the server, one number per sample is a column of width 1.
        arrays[name] = array[:, None] if array.ndim == 1 else array
    return arrays


def _classify(
    images: Sequence[Image] | np.ndarray, parameters: Mapping[str, str], top: int
) -> Steps[list[Classification]]:
    files = image_input(images)  # refuses what is not an image without calling the server
    view: RouterView = yield None
    view.require_output("probabilities", "classify images")
    marks = _marks_asked(parameters, view)
    answers = yield array_call({"image": files}, (*_LABELS, *marks), parameters, top=top)
    return _read(answers, partial(classifications, marks=marks))


def _follows(parameters: Mapping[str, str]) -> bool:
    return not parameters.keys().isdisjoint({"policy", "max_risk"})


def _marks_asked(parameters: Mapping[str, str], view: RouterView) -> tuple[str, ...]:
    """Return the outputs that say how the answers to a request for labels were chosen.

    Raises: SaccadeError for a policy if the router has none.
    """
    followed = _follows(parameters)
    if followed:
        view.require_policies()
    by_load = view.slo_ms is not None and not names_variant(parameters)
    if by_load or (followed and OBJECTIVE in parameters):
        return BY_LOAD
    return BY_POLICY if followed else ()


def _classify_as(
    images: Sequence[Image] | np.ndarray,
    labelling: Labelling,
    parameters: Mapping[str, str],
    top: int,
) -> Steps[list[Classification]]:
    """Return the best of the given labels for each image, with both towers of one variant."""
    _check_top(top)
    view: RouterView = yield None
    if "tokens" not in view.inputs("text"):
        raise SaccadeError(
            f"{view.model}: found a model of family {view.family} without a text component, which "
            "labels require. Drop the labels, or choose a model of images and text."
        )
    coded = yield from _embed_images(images, parameters)
    metadata = view.runtime_metadata(coded.variant)
    labelling = labelling.of(metadata)
    tokens = text_tokens(labelling.prompts(), metadata)
    by_variant = choice(view.budget(coded.variant))
    texts = yield from _embeddings({"tokens": tokens}, view, by_variant)
    texts.check_comparable(coded)
    chances = probabilities(coded.vectors, labelling.vectors(texts.vectors), metadata)
    return ranked(chances, labelling.labels, top, coded.variant)


def _embed_images(
    images: Sequence[Image] | np.ndarray,
    parameters: Mapping[str, str],
    space: str | None = None,
    *,
    by_policy: bool = False,
) -> Steps[Embeddings]:
    """Return embeddings of one variant or, with `by_policy`, of several in one space."""
    files = image_input(images)
    view: RouterView = yield None
    view.require_output("embedding", "embed images")
    if space is not None or (by_policy and _follows(parameters)):
        view.require_policies(embeds=True)
    if space is not None:
        chosen = view.named(space)
        return (yield from _embeddings({"image": files}, view, {**parameters, "space": chosen}))
    marks = _marks_asked(parameters, view) if by_policy and view.space else ()
    return (yield from _embeddings({"image": files}, view, parameters, marks))


def _embeddings(
    inputs: Mapping[str, np.ndarray],
    view: RouterView,
    parameters: Mapping[str, str],
    marks: tuple[str, ...] = (),
) -> Steps[Embeddings]:
    results = yield array_call(inputs, ("embedding", *_NAMES, *marks), parameters)
    space = view.space if marks else parameters.get("space")
    by = makers(results) if space else ()
    variant, sha256 = (space, view.sha256(space)) if space else made_by(results)
    if variant not in view.variants:
        raise ServerFailed(
            f"{view.model} answered with {variant}, a variant that it did not have when this "
            "client connected. Connect again."
        )
    vectors = np.concatenate([output(result, "embedding") for result in results])
    slots = view.runtime_metadata(variant).get("slots_sha256", "")
    certified = all(output(result, "certified").all() for result in results) if marks else True
    return Embeddings(vectors, variant, sha256, slots, by, certified)


def _read(results: Sequence[Any], read: Callable[[Any], list[_T]]) -> list[_T]:
    """Read the answers to the requests of a call and join the values."""
    return [value for result in results for value in read(result)]


def _by_name(images: Sequence[Image] | np.ndarray | Mapping[str, np.ndarray]) -> Mapping[str, Any]:
    return images if isinstance(images, Mapping) else {"image": images}


def _first(view: RouterView) -> dict[str, Any]:
    return view.runtime_metadata(view.variants[0])


def _check_top(top: int) -> None:
    if not 1 <= top <= 100_000:
        raise SaccadeError(f"top: found {top}, expected 1 or more labels per image.")
