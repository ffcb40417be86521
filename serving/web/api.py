# SPDX-License-Identifier: Apache-2.0
"""The HTTP API, as an application for an ASGI server.

They follow OpenAI's embeddings API, and Jina's form for classes, which OpenAI does not have. All
requests are answered on one event loop; the work is done by the server.
"""

import asyncio
import base64
import hashlib
import hmac
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.serving.client import operations
from saccade.serving.client.connection import ServerRefusedImage
from saccade.serving.client.request_sizes import FIRST_S
from saccade.serving.client.router_view import RouterView
from saccade.serving.client.wire import check_timeout
from saccade.serving.web import router_calls
from saccade.serving.web.bodies import (
    ClassifyBody,
    EmbeddingsBody,
    WebRefusal,
    read_body,
    read_inputs,
)
from saccade.serving.web.origin import foreign
from saccade.serving.web.router_calls import RouterCalls, WebCaller, choice_of, dimensions_of

BODY_BYTES = 34 * 2**20  # images of as many bytes as a request of the router has, in base64
HELD_BYTES = 8 * BODY_BYTES  # of all bodies that are being read or answered
BODY_S = 30.0  # until a body must have arrived
WATCH_S = 0.1  # after which a caller is watched: most answers come sooner
LONGEST_S = 600.0
# The client of OpenAI sends its own limit in the second one.
_TIMEOUTS = ("x-request-timeout", "x-stainless-read-timeout")
_TRACE, _VISIBLE = ("traceparent", "tracestate"), re.compile("[ -~]+")
_KINDS = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "server_error"}
Inputs = list[str | bytes]
Headers = Mapping[str, str]
Answer = Callable[[Request, Headers], Awaitable[Any]]
_ONE_MODEL = "/v1/models/"
LOGGER = logging.getLogger("saccade.openai")


class Api:
    """Answers of the routes; without keys, every caller that can connect is answered."""

    def __init__(self, url: str, model: str, keys: Sequence[str]) -> None:
        self._router = RouterCalls(url, model)
        self._keys = [_digest(key) for key in keys]
        self._held = 0
        self._began = int(time.time())
        self._routes: dict[tuple[str, str], Answer] = {
            ("POST", "/v1/embeddings"): partial(self._with_body, EmbeddingsBody, self._embed),
            ("POST", "/v1/classify"): partial(self._with_body, ClassifyBody, self._classify),
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, as an ASGI application."""
        method, path = scope["method"], scope["path"]
        answer = self._routes.get((method, path))
        if answer is None and method == "GET" and path.startswith(_ONE_MODEL):
            answer = self._model
        response = await self._answered(answer or self._unknown, Request(scope, receive))
        await response(scope, receive, send)

    async def _answered(self, answer: Answer, request: Request) -> Response:
        raw = request.scope["headers"]  # in lower case
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in raw}
        try:
            self._check_caller(headers)
            return _json(await answer(request, headers))
        except ClientDisconnect:
            return Response(status_code=499)  # which nobody reads
        except WebRefusal as refusal:
            return _refused(refusal)
        except SaccadeError as error:
            status = 503 if isinstance(error, ServerFailed) else 400
            return _refused(WebRefusal(str(error), status))
        except Exception:
            LOGGER.exception("a request failed")
            return _refused(WebRefusal("The service has a fault, which its log describes.", 500))

    async def _unknown(self, request: Request, _: Headers) -> None:
        method, path = request.scope["method"], request.scope["path"]
        status = 405 if any(path == known for _, known in self._routes) else 404
        text = f"{method} {path:.80} is not a route of this service."
        raise WebRefusal(text, status, "unknown_route")

    def _check_caller(self, headers: Headers) -> None:
        if reason := foreign(headers, any_host=bool(self._keys)):
            raise WebRefusal(f"Refused: {reason}.", 403, "foreign_page")
        _, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip())
        # Every key is compared, so that the time tells nothing about them.
        if self._keys and sum(hmac.compare_digest(digest, key) for key in self._keys) == 0:
            text = f"Found {'a wrong' if given else 'no'} key, expected the header Authorization: "
            text += "Bearer KEY with a key of this service (client of OpenAI: api_key)."
            raise WebRefusal(text, 401, "invalid_api_key")

    async def _models(self, *_: Any) -> dict[str, Any]:
        view = await self._router.view()
        names = router_calls.named_models(view)
        return {"object": "list", "data": [self._entry(name, view) for name in names]}

    async def _model(self, request: Request, _: Headers) -> dict[str, Any]:
        return self._entry(
            request.scope["path"].removeprefix(_ONE_MODEL), await self._router.view()
        )

    def _entry(self, name: str, view: RouterView) -> dict[str, Any]:
        budget = choice_of(name, view).get("budget")
        named = {view.budget(variant): variant for variant in view.variants}
        variant = view.variants[0] if budget is None else named.get(budget)
        entry: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "saccade",
        }
        if variant is None:  # a number: the router knows which variant that is
            return entry
        entry |= {"variant": variant, "variant_sha256": view.sha256(variant), "tasks": view.tasks}
        return entry | {"dimensions": dimensions_of(view).get(variant)}

    async def _health(self, *_: Any) -> dict[str, Any]:
        return {"ready": True, "model": (await self._router.look()).model}

    async def _with_body(
        self,
        kind: type[Any],
        answer: Callable[[Any, Inputs, WebCaller], Awaitable[dict[str, Any]]],
        request: Request,
        headers: Headers,
    ) -> dict[str, Any]:
        timeout_s, pieces = _timeout_s(headers), bytearray()
        try:
            await self._receive(request, pieces)
            body, inputs = _read(request, headers, bytes(pieces), kind)
            found = {name: headers.get(name, "") for name in _TRACE}
            # gRPC accepts no other characters in headers.
            trace = [(name, text) for name, text in found.items() if re.fullmatch(_VISIBLE, text)]
            name = body.user or (request.client.host if request.client else "web")
            caller = WebCaller(name, timeout_s, time.monotonic() + timeout_s, tuple(trace))
            return await _while_waiting(request, answer(body, inputs, caller), inputs)
        finally:
            self._held -= len(pieces)

    async def _receive(self, request: Request, pieces: bytearray) -> None:
        """Append the body to `pieces`.

        More than the limit is received too, but not kept: a caller that finds the connection
        closed while it sends does not read why.
        """
        size, message = 0, {"more_body": True}
        try:
            async with asyncio.timeout(BODY_S):
                while message["more_body"]:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    piece = message["body"]
                    size += len(piece)
                    if size <= BODY_BYTES and self._held <= HELD_BYTES:
                        pieces += piece
                        self._held += len(piece)
        except TimeoutError:
            text = f"The body had not arrived after {BODY_S:g} s. Send a smaller one."
            raise WebRefusal(text, 408, "timeout") from None
        if size > BODY_BYTES:
            text = (
                f"The body has {size / 2**20:.1f} MiB, expected at most {BODY_BYTES >> 20}. Send "
            )
            raise WebRefusal(f"{text}fewer or smaller images per request.", 413, "too_large")
        if size > len(pieces):
            text = "Other requests take all memory for bodies. Try again in a second."
            raise WebRefusal(text, 429, "rate_limit_exceeded", retry_after_s=1)

    async def _embed(
        self, body: EmbeddingsBody, inputs: Inputs, caller: WebCaller
    ) -> dict[str, Any]:
        view = await self._router.view()
        chosen = choice_of(body.model, view)
        lengths = {} if body.dimensions is None else dimensions_of(view)
        if body.dimensions in lengths.values() and not chosen:
            variant = next(name for name in lengths if lengths[name] == body.dimensions)
            chosen = {"budget": view.budget(variant)}
        operation = partial(router_calls.embedded, inputs, chosen, truncate=body.truncate)
        vectors, made = await self._router.run(operation, caller)
        view = await self._router.view()  # another one if the server was replaced
        if body.dimensions not in (None, vectors.shape[1]):
            known = ", ".join(map(str, sorted({*lengths.values(), vectors.shape[1]})))
            text = f"dimensions: found {body.dimensions}, but {body.model} answers with "
            text += f"{vectors.shape[1]}. {view.model} has {known}. Leave it out, or change it."
            raise WebRefusal(text, param="dimensions")
        rows: Any = vectors
        if body.encoding_format == "base64":
            rows = [base64.b64encode(row).decode() for row in vectors.astype("<f4")]
        data = [
            {"object": "embedding", "index": index, "embedding": row}
            for index, row in enumerate(rows)
        ]
        makers, certified = [name for name, _ in made.makers], made.certified if made.by else None
        return _answer(data, made.variant, makers, certified, caller, view, chosen)

    async def _classify(
        self, body: ClassifyBody, inputs: Inputs, caller: WebCaller
    ) -> dict[str, Any]:
        view = await self._router.view()
        chosen = choice_of(body.model, view)
        if not all(isinstance(item, bytes) for item in inputs):
            raise WebRefusal("input: found text, expected images only.", param="input")
        asked: dict[str, Any] = {"top": body.top, "labels": body.labels, **chosen}
        operation = partial(operations.classify, inputs, templates=body.templates, **asked)
        answers = await self._router.run(operation, caller)
        view = await self._router.view()
        data = [
            {"object": "classification", "index": index, "prediction": one.labels[0][0]}
            | {"score": one.labels[0][1], **one.to_dict()}
            for index, one in enumerate(answers)
        ]
        marks = [one.certified for one in answers if one.certified is not None]
        makers, certified = [one.variant for one in answers], all(marks) if marks else None
        return _answer(data, makers[0], makers, certified, caller, view, chosen)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _read(request: Request, headers: Headers, body: bytes, kind: type[Any]) -> tuple[Any, Inputs]:
    if encoding := headers.get("content-encoding"):
        text = f"Content-Encoding is {encoding!r:.40}, expected none. Do not compress the body."
        raise WebRefusal(text, 415)
    if headers.get("content-type", "").lower().startswith("image/"):
        fields: dict[str, Any] = {"input": "", **request.query_params}
        numbers = {"top", "dimensions"} & fields.keys()
        fields |= {name: int(fields[name]) for name in numbers if fields[name].isdecimal()}
        return read_body(kind, fields), [body]
    try:
        content = orjson.loads(body)
    except ValueError as error:
        kind_of_body = headers.get("content-type", "no type")
        raise WebRefusal(
            f"The body ({kind_of_body:.60}) is not JSON ({error!s:.100}). With the bytes of an "
            "image, send Content-Type: image/png, or its own type."
        ) from error
    checked = read_body(kind, content)
    return checked, read_inputs(checked.input)


def _timeout_s(headers: Headers) -> float:
    limits = {name: headers[name] for name in _TIMEOUTS if name in headers}
    seconds = [LONGEST_S] if limits else [FIRST_S]
    for name, text in limits.items():
        try:
            seconds.append(check_timeout(float(text)))
        except (ValueError, SaccadeError) as error:
            text = f"{name} is {text!r:.40}, expected a number of seconds above 0."
            raise WebRefusal(text, param=name) from error
    return min(seconds)


async def _while_waiting(
    request: Request, work: Awaitable[dict[str, Any]], inputs: Inputs
) -> dict[str, Any]:
    """Return the answer, or stop the work when its caller disconnects.

    Raises: ClientDisconnect; WebRefusal for an image, with its index among the inputs.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    watchers: list[asyncio.Task[None]] = []

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        assert task is not None
        task.cancel()

    # No task is made for an answer that comes soon, as most do.
    timer = loop.call_later(WATCH_S, lambda: watchers.append(loop.create_task(watch())))
    try:
        return await work
    except asyncio.CancelledError:
        if watchers and watchers[0].done():
            raise ClientDisconnect from None
        raise
    except ServerRefusedImage as error:
        images = [index for index, item in enumerate(inputs) if isinstance(item, bytes)]
        where = f"input[{images[error.index]}]"
        raise WebRefusal(f"{where}: {error.reason}", 400, "invalid_image", param=where) from error
    finally:
        timer.cancel()
        for watcher in watchers:
            watcher.cancel()


def _answer(
    data: list[dict[str, Any]],
    variant: str,
    makers: Sequence[str],
    certified: bool | None,
    caller: WebCaller,
    view: RouterView,
    chosen: dict[str, str],
) -> dict[str, Any]:
    usage = {"prompt_tokens": caller.tokens, "total_tokens": caller.tokens, "variant": variant}
    budget = view.budget(variant) if variant in view.variants else None
    usage |= {"budget": budget, "answered_by": Counter(makers), "certificate": None}
    if certified is not None:
        usage["certificate"] = {"policy": chosen.get("policy"), "certified": certified}
    return {"object": "list", "data": data, "model": variant, "usage": usage}


def _json(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(body, status, headers, "application/json")


def _refused(refusal: WebRefusal) -> Response:
    kind = _KINDS.get(refusal.status, "invalid_request_error")
    error = {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}
    headers = {"Connection": "close"} if refusal.status == 408 else {}  # the rest is not read
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(math.ceil(refusal.retry_after_s))
    return _json({"error": error}, refusal.status, headers)
