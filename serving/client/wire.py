# SPDX-License-Identifier: Apache-2.0
"""Wire format: requests to the router and its answers as tensors of the protocol."""

import math
import os
import secrets
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import count
from typing import Any, TypeVar

import numpy as np

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.models.budget import BudgetLike, number
from saccade.serving.client.images import MAX_IMAGES, MAX_REQUEST_BYTES, Image, encoded

DEFAULT_URL = "127.0.0.1:8001"
Budget = BudgetLike  # a fraction of the full model, or the name of a budget, such as fast or t2
# Outputs of the router that are text. They arrive as rows of UTF-8 bytes, padded with zeros.
TEXTS = ("variant", "variant_sha256", "caption")
OBJECTIVE = "max_latency_ms"
GRACE_S = 0.1
LONGEST_S = 7 * 24 * 3600.0  # what the router treats as forever
_NUMBERS = count(1)
_T = TypeVar("_T")
# From the router's own code, whose files import each other by their bare names.
_RULES: Mapping[str, Any] = import_module("saccade.model_repository.router.choose").RULES


@dataclass(frozen=True)
class Call:
    """A call of a router, over any connection or none, and each request that it is split into.

    Shapes: the first axis of every input is the samples.
    Units: timeout_s is the time limit of a request; None: no limit.
    """

    inputs: Mapping[str, np.ndarray]
    outputs: tuple[str, ...]  # empty: all outputs
    parameters: Mapping[str, str]
    top: int | None = None  # `probabilities` as this many labels instead of numbers
    # If answers depend on a sample's index: the parameter with that of a request's first sample.
    first_row: str | None = None
    timeout_s: float | None = None

    @property
    def rows(self) -> int:
        """Number of samples."""
        return len(next(iter(self.inputs.values())))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key of calls whose samples cost about the same."""
        parameters = {name: self.parameters[name] for name in self.parameters if name != "seed"}
        return tuple(self.inputs), tuple(sorted(parameters.items()))

    def part(self, start: int, stop: int) -> "Call":
        """Return a request with these samples, or fewer if they have too many bytes.

        Where answers depend on a sample's index, the index starts again every `MAX_IMAGES` samples.
        """
        index = start % MAX_IMAGES
        if self.first_row is not None:
            stop = min(stop, start + MAX_IMAGES - index)
        size, end = 0, start
        while end < min(stop, self.rows):
            size += sum(map(_row_bytes, (array[end] for array in self.inputs.values())))
            if end > start and size > MAX_REQUEST_BYTES:
                break
            end += 1
        inputs = {name: array[start:end] for name, array in self.inputs.items()}
        place = {self.first_row: str(index)} if self.first_row and index else {}
        return replace(self, inputs=inputs, parameters={**self.parameters, **place})


def _row_bytes(row: np.ndarray) -> int:
    return sum(map(len, row.flat)) if row.dtype == object else row.nbytes


# Yields calls, or None to request the router's view; receives a list of answers to each call, one
# per request that it was split into.
Steps = Generator[Call | None, Any, _T]


_BY_POLICY = ("policy", "max_risk")
_RISK = (lambda risk: 0 <= risk < 1, "a number of at least 0 and below 1, such as 0.01")


def names_variant(parameters: Mapping[str, str]) -> bool:
    """Return whether a parameter chooses the variant, whatever the load."""
    return not parameters.keys().isdisjoint({*_RULES} - {OBJECTIVE})


def choice(
    budget: Budget | None = None,
    *,
    policy: str | None = None,
    max_risk: float | None = None,
    strict: bool = False,
    **other_rules: BudgetLike | None,
) -> dict[str, str]:
    """Return the request parameters by which the router chooses; without, it uses the full model.

    Raises: SaccadeError if there is more than one, if its value is out of range, or if `strict` is
        set without a policy.
    """
    given = {"budget": budget, **other_rules, "policy": policy, "max_risk": max_risk}
    chosen = {name: value for name, value in given.items() if value is not None}
    followed = not chosen.keys().isdisjoint(_BY_POLICY)
    if strict and not followed:
        raise SaccadeError(
            "Found --strict without --policy or --max-risk. Pass one of them, or drop --strict."
        )
    # With a policy, the largest latency is the objective of a request that adapts to the load.
    ways = [name for name in chosen if not (followed and name == OBJECTIVE)]
    if len(ways) > 1:
        flags = ", ".join("--" + name.replace("_", "-") for name in ways)
        raise SaccadeError(f"Found {flags} together, but each chooses the variant. Pass one.")
    parameters = {name: _text(name, value) for name, value in chosen.items()}
    return parameters | ({"strict": "true"} if strict else {})


def _text(name: str, value: BudgetLike) -> str:
    """Return a parameter as text: the protocol would guess whether a number is an integer."""
    if name == "policy":
        return str(value)
    parsed: float | str
    try:
        parsed = number(value) if name == "budget" else float(value)
    except ValueError:
        parsed = value if isinstance(value, str) else math.nan
    if isinstance(parsed, str) and name != "max_risk":
        return parsed  # the router knows whether there is such a budget
    # The range of a score depends on the model; the router checks it.
    holds, words = _RULES[name].range if name in _RULES else _RISK
    if isinstance(parsed, str) or not holds(parsed):
        raise SaccadeError(f"{name} is {value!r:.60}, expected {words}.")
    return repr(parsed)


def image_input(images: Sequence[Image] | np.ndarray) -> np.ndarray:
    """Return images as the router takes them.

    Shapes: -> object [n 1] of the bytes of files.
    """
    return np.array(encoded(images), dtype=object).reshape(-1, 1)


def array_call(
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str] | None,
    parameters: Mapping[str, str],
    *,
    top: int | None = None,
    first_row: str | None = None,
) -> Call:
    """Return a call with all rows of the arrays.

    With `top`, the server returns that many labels for `probabilities` instead of numbers.

    Raises: SaccadeError if the arrays have different numbers of rows, or no rows.
    """
    rows = {name: len(array) for name, array in inputs.items()}
    if len(set(rows.values())) != 1 or 0 in rows.values():
        counts = ", ".join(f"{name} {count}" for name, count in rows.items()) or "none"
        raise SaccadeError(f"Inputs: found {counts} rows, expected the same number, 1 or more.")
    return Call(inputs, tuple(outputs or ()), parameters, top, first_row)


def over_grpc(call: Call) -> dict[str, Any]:
    """Return a call as the arguments of `infer` of NVIDIA's client, except the deadline."""
    from tritonclient.grpc import InferInput, InferRequestedOutput
    from tritonclient.utils import np_to_triton_dtype

    tensors = []
    for name, array in call.inputs.items():
        tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(np.ascontiguousarray(array))
        tensors.append(tensor)
    wanted = [
        InferRequestedOutput(name, class_count=call.top)
        if call.top and name == "probabilities"
        else InferRequestedOutput(name)
        for name in call.outputs
    ]
    parameters = dict(call.parameters) or None
    return {"inputs": tensors, "outputs": wanted or None, "parameters": parameters}


def infer_message(
    model: str,
    inputs: Mapping[str, np.ndarray],
    outputs: Iterable[str],
    parameters: Mapping[str, str],
) -> Any:
    """Return a ModelInferRequest, which may be changed before it is serialized.

    Building it here takes a fifth of the time that NVIDIA's client needs for the same bytes.
    """
    from tritonclient.grpc import service_pb2
    from tritonclient.utils import np_to_triton_dtype

    message = service_pb2.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        kind = np_to_triton_dtype(array.dtype)
        message.inputs.add(name=name, datatype=kind, shape=array.shape)
        if kind == "BYTES":
            content = b"".join(len(value).to_bytes(4, "little") + value for value in array.flat)
        else:
            content = np.ascontiguousarray(array).tobytes()
        message.raw_input_contents.append(content)
    for name in outputs:
        message.outputs.add(name=name)
    for name, value in parameters.items():
        message.parameters[name].string_param = value
    return message


def serialized(call: Call, model: str, request_id: str, timeout_s: float) -> bytes:
    """Return a request as the message that gRPC sends, with a deadline that the server keeps."""
    message = infer_message(model, call.inputs, call.outputs, call.parameters)
    message.id = request_id
    for wanted in message.outputs:
        if call.top and wanted.name == "probabilities":
            wanted.parameters["classification"].int64_param = call.top
    message.parameters["timeout"].int64_param = server_timeout(timeout_s)
    return bytes(message.SerializeToString())


def server_timeout(timeout_s: float) -> int:
    """Return a deadline as the protocol's request parameter, in microseconds."""
    return max(1, int(1e6 * min(timeout_s, LONGEST_S)))


def with_deadline(arguments: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Return the call with this program's name and a deadline that the server itself keeps.

    gRPC's own deadline is a little later, for a server that does not answer at all. A call that
    gRPC cuts off is cancelled in the server, which costs the server more than an answer.
    """
    return {
        **arguments,
        "client_timeout": timeout_s + GRACE_S,
        "timeout": server_timeout(timeout_s),
        "request_id": f"{program()}/{next(_NUMBERS)}",
        "headers": trace_headers() or None,
    }


def trace_headers() -> dict[str, str]:
    """Return the W3C trace context of the application's active span as headers for a call.

    OpenTelemetry is not imported here: an application that does not use it has no active span.
    """
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


@cache
def program() -> str:
    """Return a name for this caller; different callers get equal shares of a busy server."""
    return f"{os.getpid():x}-{secrets.token_hex(4)}"


def check_timeout(timeout_s: float) -> float:
    """Check that a deadline is a positive number of seconds, and return it.

    Raises: SaccadeError if it is not above 0.
    """
    if not 0 < timeout_s < math.inf:
        raise SaccadeError(f"timeout_s: found {timeout_s}, expected a positive number of seconds.")
    return timeout_s


def output(result: Any, name: str) -> np.ndarray:
    """Return an output of an answer; text becomes an array of bytes objects [b 1].

    Raises: ServerFailed if the answer does not contain it.
    """
    array = result.as_numpy(name)
    if array is None or array.size == 0:
        raise ServerFailed(
            f"The answer contains no {name}. The server needs numpy < 2. Run `saccade doctor`."
        )
    return as_texts(array) if name in TEXTS else np.asarray(array)


def as_texts(rows: np.ndarray) -> np.ndarray:
    """Return the text in each row of an answer.

    Shapes: uint8 [b bytes], padded with zeros -> object [b 1] of bytes.
    """
    return np.ascontiguousarray(rows).view(f"S{rows.shape[1]}").astype(object)


def texts(result: Any, name: str) -> list[str]:
    """Return an output of text as a list of strings, one per row."""
    return [text.decode() for text in output(result, name).reshape(-1)]


def makers(results: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Return the variant that answered each row, and its hash."""
    return tuple(
        pair
        for result in results
        for pair in zip(texts(result, "variant"), texts(result, "variant_sha256"), strict=True)
    )


def made_by(results: Sequence[Any]) -> tuple[str, str]:
    """Return the one variant, and its hash, that all answers come from.

    Raises: ServerFailed if they come from several variants.
    """
    pairs = {*makers(results)}
    if len(pairs) != 1:
        raise ServerFailed(
            f"The answers come from {len(pairs)} variants ({sorted(pairs)}): the server was "
            "replaced between two requests. Try again."
        )
    return next(iter(pairs))
