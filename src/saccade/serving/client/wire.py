# SPDX-License-Identifier: Apache-2.0
"""Wire format: what goes to the router and comes back, as the protocol's tensors."""

import math
import os
import secrets
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from itertools import count
from typing import Any, TypeVar

import numpy as np

from saccade.errors import SaccadeError, ServerFailed
from saccade.models.budget import BudgetLike, number
from saccade.serving.client.images import MAX_IMAGES, Image, encoded, requests

DEFAULT_URL = "127.0.0.1:8001"
Budget = BudgetLike  # a fraction of the full model, or a budget by its name, such as fast or t2
# Outputs of the router that are texts. They come as rows of bytes in UTF-8 with zeros behind; of
# repositories that were written before this, as strings.
TEXTS = ("variant", "variant_sha256", "caption")
Call = dict[str, Any]  # arguments of `infer`, the deadline excepted
_T = TypeVar("_T")
# Calls, or None to be told the router's view; each is sent what it is answered.
Steps = Generator[Call | None, Any, _T]
GRACE_S = 0.1
LONGEST_S = 7 * 24 * 3600.0  # what the router takes for ever
_NUMBERS = count(1)
# Of the router's own code, whose files import one another by their bare names.
_RULES: Mapping[str, Any] = import_module("saccade.model_repository.router.choose").RULES


def choice(
    budget: Budget | None = None,
    *,
    policy: str | None = None,
    max_risk: float | None = None,
    strict: bool = False,
    **other_rules: BudgetLike | None,
) -> dict[str, str]:
    """The request parameter by which the router chooses; none takes the full model.

    Raises: SaccadeError if there is more than one, it is out of range, or nothing is to be strict
        about.
    """
    followed = by_policy(policy, max_risk, strict=strict)
    given = {"budget": budget, **other_rules}
    chosen = {name: _number(name, value) for name, value in given.items() if value is not None}
    ways = [*chosen, *(name for name in followed if name != "strict")]
    if len(ways) > 1:
        flags = ", ".join("--" + name.replace("_", "-") for name in ways)
        raise SaccadeError(f"{flags} were given together; each chooses the variant. Give one.")
    if followed:
        return followed
    for name, value in chosen.items():
        if isinstance(value, str):
            return {name: value}  # whether there is such a budget, the router knows
        # What a score may be depends on the model's: the router knows.
        allowed = _RULES[name].range
        if not allowed.holds(value):
            raise SaccadeError(f"{name} is {value:g}, expected {allowed.words}.")
    # As text: a number in a request is an integer or a double by its looks.
    return {name: repr(value) for name, value in chosen.items()}


def by_policy(policy: str | None, max_risk: float | None, *, strict: bool) -> dict[str, str]:
    """The request parameters of a policy; none without one.

    Raises: SaccadeError for a risk that is none, and where nothing is to be strict about.
    """
    given = {} if policy is None else {"policy": str(policy)}
    if max_risk is not None:
        risk = _number("max_risk", max_risk)
        if isinstance(risk, str) or not 0 <= risk < 1:
            raise SaccadeError(
                f"max_risk is {max_risk!r:.60}, expected a number of at least 0 and below 1, such "
                "as 0.01."
            )
        given["max_risk"] = repr(risk)
    if strict and not given:
        raise SaccadeError(
            "--strict was given without --policy or --max-risk. Name a policy, or leave it out."
        )
    return given | ({"strict": "true"} if strict else {})


def _number(name: str, value: BudgetLike) -> float | str:
    try:
        return number(value) if name == "budget" else float(value)
    except ValueError:
        if isinstance(value, str):
            return value
        raise SaccadeError(f"{name} is {value!r:.60}, expected a number.") from None


def image_calls(
    images: Sequence[Image] | np.ndarray,
    outputs: Sequence[str],
    parameters: Mapping[str, str],
    *,
    top: int | None = None,
) -> Iterator[Call]:
    """A call for each request that takes some of the images.

    With `top` the server answers with that many labels of `probabilities` instead of numbers.
    """
    for files in list(requests(encoded(images))):
        array = np.array(files, dtype=object).reshape(-1, 1)
        yield call({"image": array}, outputs, parameters, top=top)


def array_calls(
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str] | None,
    parameters: Mapping[str, str],
    *,
    top: int | None = None,
) -> Iterator[Call]:
    """A call for each request that takes some rows of the arrays.

    Raises: SaccadeError if the arrays differ in their number of rows, or have none.
    """
    rows = {name: len(array) for name, array in inputs.items()}
    if len(set(rows.values())) != 1 or 0 in rows.values():
        counts = ", ".join(f"{name} {count}" for name, count in rows.items()) or "none"
        raise SaccadeError(f"Rows of the inputs: {counts}; expected the same number, 1 or more.")
    for at in range(0, next(iter(rows.values())), MAX_IMAGES):
        part = {name: array[at : at + MAX_IMAGES] for name, array in inputs.items()}
        yield call(part, outputs, parameters, top=top)


def call(
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str] | None,
    parameters: Mapping[str, str],
    *,
    top: int | None = None,
) -> Call:
    """Arguments of `infer` for one request; without `outputs` everything is answered."""
    from tritonclient.grpc import InferInput, InferRequestedOutput
    from tritonclient.utils import np_to_triton_dtype

    tensors = []
    for name, array in inputs.items():
        tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(np.ascontiguousarray(array))
        tensors.append(tensor)
    wanted = [
        InferRequestedOutput(name, class_count=top)
        if top and name == "probabilities"
        else InferRequestedOutput(name)
        for name in outputs or ()
    ]
    return {"inputs": tensors, "outputs": wanted or None, "parameters": dict(parameters) or None}


def with_deadline(arguments: Call, timeout_s: float) -> Call:
    """The same call, which the server answers or refuses in its time, in the name of this program.

    The deadline of gRPC comes a little later, for a server that says nothing: a call that it cuts
    off is cancelled in the server, which costs more there than an answer.
    """
    return {
        **arguments,
        "client_timeout": timeout_s + GRACE_S,
        "timeout": max(1, int(1e6 * min(timeout_s, LONGEST_S))),
        "request_id": f"{program()}/{next(_NUMBERS)}",
        "headers": trace_headers() or None,
    }


def trace_headers() -> dict[str, str]:
    """W3C trace context of the application's active span, in the headers of a call.

    Nothing of OpenTelemetry is imported: an application without it has no span that is active.
    """
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


@cache
def program() -> str:
    """The caller's name: requests with different ones get equal shares of a busy server."""
    return f"{os.getpid():x}-{secrets.token_hex(4)}"


def check_timeout(timeout_s: float) -> float:
    """A deadline that is one.

    Raises: SaccadeError if it is not above 0.
    """
    if not 0 < timeout_s < math.inf:
        raise SaccadeError(f"timeout_s is {timeout_s}, expected seconds above 0.")
    return timeout_s


def output(result: Any, name: str) -> np.ndarray:
    """An output of an answer; texts as an array of bytes objects [b 1].

    Raises: ServerFailed if it is not there.
    """
    array = result.as_numpy(name)
    if array is None or array.size == 0:
        raise ServerFailed(
            f"The answer has no {name}. The server must run with numpy < 2: see `saccade doctor`."
        )
    return as_texts(array) if is_text(name, array) else np.asarray(array)


def is_text(name: str, array: np.ndarray) -> bool:
    """True if an output is a text in rows of bytes, and not a string of an older repository."""
    return name in TEXTS and array.dtype == np.uint8


def as_texts(rows: np.ndarray) -> np.ndarray:
    """The texts of an answer's rows.

    Shapes: uint8 [b bytes], zeros behind a shorter text -> object [b 1] of bytes.
    """
    array = np.empty((len(rows), 1), dtype=object)
    array[:, 0] = [row.tobytes().rstrip(b"\0") for row in rows]
    return array


def texts(result: Any, name: str) -> list[str]:
    """An output of texts, one a row."""
    return [
        text.decode() if isinstance(text, bytes) else str(text)
        for text in output(result, name).reshape(-1)
    ]


def made_by(results: Sequence[Any]) -> tuple[str, str]:
    """The one variant and its hash that all answers come from.

    Raises: ServerFailed if they come of several.
    """
    pairs = {
        pair
        for result in results
        for pair in zip(texts(result, "variant"), texts(result, "variant_sha256"), strict=True)
    }
    if len(pairs) != 1:
        raise ServerFailed(
            f"The answers come from {len(pairs)} variants ({sorted(pairs)}): the server was "
            "exchanged between two requests. Ask again."
        )
    return next(iter(pairs))
