# SPDX-License-Identifier: Apache-2.0
"""Connections to a server that may restart while they are open, and failed calls, explained."""

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from saccade.core.errors import SaccadeError, ServerFailed

SERVICE = "/inference.GRPCInferenceService"  # start of the path of every method
_LARGEST_MESSAGE = 2**31 - 1
# This prefix of an address means TLS. To trust more than the usual authorities, set gRPC's own
# environment variable GRPC_DEFAULT_SSL_ROOTS_FILE_PATH.
TLS = "grpcs://"
EXAMPLE = "127.0.0.1:8001"
_GRPC_FORMS = ("dns:", "ipv4:", "ipv6:", "unix:")
_UNREACHABLE = re.compile(
    r"failed to connect|connection refused|socket closed|connection reset|broken pipe|recvmsg"
    r"|connection attempt|dns resolution|name resolution|goaway|http2|end of tcp stream",
    re.IGNORECASE,
)
# The server names the instance of a dead model; the router names the variant that did not answer.
_DEAD = re.compile(
    r"'([a-z0-9-]+)_\d+_\d+' is not healthy|variant '([a-z0-9-]+)' (?:failed|has died)"
)
# First the server's own words, then the router's: full, late, no variant in time, and a timeout.
_BUSY = re.compile(
    r"maximum queue size|queue of variant '[a-z0-9-]+' is full|(?:variant|model) '[^']+' is busy"
    r"|request's timeout ran out",
    re.IGNORECASE,
)
# The address has an unknown host, or is not an address.
_NO_ADDRESS = re.compile(r"errors resolving|lookup error|dns|name resolution", re.IGNORECASE)
# What gRPC says if the other side answers in another protocol, or if TLS fails.
_NO_GRPC = re.compile(r"parsing HTTP/2|expected SETTINGS frame", re.IGNORECASE)
_NO_TLS = re.compile(r"tls handshake failed", re.IGNORECASE)
# The router's words for a file that it cannot use as an image; of several, it gives the index.
_IMAGE = re.compile(
    r"(?:image (?P<index>\d+): )?"
    r"(?P<reason>(?:\w+ )?image (?:of|has|is|declares) .*|not a JPEG.* file \(.*)"
)


def check_url(url: str) -> str:
    """Return the address without the prefix for TLS.

    Raises: SaccadeError unless it is HOST:PORT or one of gRPC's own forms (dns:, ipv4:, unix:).
    """
    place = url.removeprefix(TLS)
    if place.startswith(_GRPC_FORMS):
        return place
    words = f"expected the server's gRPC address, HOST:PORT, such as {EXAMPLE}"
    if "://" in place:
        advice = "Leave out the scheme, or write grpcs://HOST:PORT for TLS"
        if place.startswith("http"):
            advice = "HTTP uses another port: pass the gRPC port, 8001 by default"
        raise SaccadeError(f"--url: found {url!r}, {words}. {advice}.")
    host, _, port = place.rpartition(":")
    if not host or "/" in place or not (port.isdecimal() and 0 < int(port) < 65536):
        raise SaccadeError(f"--url: found {url!r}, {words}. Pass host and port.")
    return place


def connect(url: str, **options: int) -> Any:
    """Return a blocking gRPC client; it connects with the first call.

    Raises: SaccadeError if `url` is not an address.
    """
    place = check_url(url)
    from tritonclient.grpc import InferenceServerClient

    arguments = _arguments(place, options)
    return InferenceServerClient(place, ssl=place != url, channel_args=arguments)


def connect_asyncio(url: str) -> Any:
    """Return an asyncio gRPC client for the running event loop."""
    place = check_url(url)
    from tritonclient.grpc.aio import InferenceServerClient

    return InferenceServerClient(place, ssl=place != url, channel_args=_arguments(place, {}))


def channel_asyncio(url: str, **options: Any) -> Any:
    """Return a bare gRPC channel for the running event loop."""
    import grpc

    place = check_url(url)
    arguments = _arguments(place, options)
    if place != url:
        return grpc.aio.secure_channel(place, grpc.ssl_channel_credentials(), options=arguments)
    return grpc.aio.insecure_channel(place, options=arguments)


def connect_alone(url: str) -> Any:
    """Return a client that shares nothing with others, such as the waits between attempts."""
    return connect(url, **{"grpc.use_local_subchannel_pool": 1})


def _arguments(url: str, options: Mapping[str, Any]) -> list[tuple[str, Any]]:
    arguments = {
        "grpc.max_send_message_length": _LARGEST_MESSAGE,
        "grpc.max_receive_message_length": _LARGEST_MESSAGE,
        # By default, gRPC waits up to two minutes before it tries to connect again.
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.max_reconnect_backoff_ms": 1000,
    }
    if is_loopback(url.rpartition(":")[0].strip("[]")):
        # Never use a proxy from the environment between two programs on one machine.
        arguments["grpc.enable_http_proxy"] = 0
    return list({**arguments, **options}.items())


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ServerRefusedImage(SaccadeError):
    """The server cannot read or does not accept an image: its index in the request, and why."""

    def __init__(self, where: str, said: str, index: int, reason: str) -> None:
        super().__init__(f"{where} refuses the request: {said}")
        self.where, self.index, self.reason = where, index, reason


class UnknownModel(SaccadeError):
    """The server has no such model; the message lists its routers if they are known."""

    def __init__(self, url: str, model: str, routers: Sequence[str] = ()) -> None:
        names = ", ".join(routers)
        has = f"This server has: {names}." if names else f"`saccade doctor --url {url}` lists them."
        super().__init__(f"{url}: there is no model '{model}'. {has}")


def is_unreachable(error: Any) -> bool:
    """Return True if nothing accepted the connection, so that the model's state is unknown."""
    refused = str(error.status()).endswith("UNAVAILABLE")
    return refused and _UNREACHABLE.search(str(error.message())) is not None


def is_queue_full(error: Any) -> bool:
    """Return True if the server refused a request only because many others are waiting."""
    return says_busy(str(error.message()))


def says_busy(text: str) -> bool:
    """Return True if a refusal's words mean that others were waiting, or that time ran out."""
    return _BUSY.search(text) is not None


@contextmanager
def explained(url: str, model: str, timeout_s: float) -> Iterator[None]:
    """Raise the failure of a call to `model` at `url` with an explanation."""
    from tritonclient.utils import InferenceServerException

    try:
        yield
    except InferenceServerException as error:
        raise explain(error, url, model, timeout_s) from error


def explain(error: Any, url: str, model: str, timeout_s: float) -> SaccadeError:
    """Return the error to raise for an InferenceServerException of a call to `model` at `url`."""
    status = str(error.status() or "").removeprefix("StatusCode.")
    said = _in_one_line(error)

    def failed(text: str, *, retry: bool = True) -> ServerFailed:
        return ServerFailed(f"{url}: {text}", retry=retry, status=status)

    if status == "UNAVAILABLE" and (_NO_ADDRESS.search(said) or _UNREACHABLE.search(said)):
        text, retry = _not_connected(error)
        return failed(text, retry=retry)
    if status == "DEADLINE_EXCEEDED":
        return failed(
            f"no answer from {model} within {timeout_s:g} s. It hangs, is overloaded or "
            "needs more time. Read its log (what `saccade serve` prints) and restart it if it "
            "hangs; otherwise pass a longer --timeout-s (Python: timeout_s) or a smaller budget. "
            "Try again in a few seconds."
        )
    if dead := _DEAD.search(said):
        return failed(_died(dead[1] or dead[2], model))
    if "ready state" in said or "no available versions" in said or "Server is stopping" in said:
        return failed("the server is stopping or being restarted. Try again later.")
    if "unknown model" in said or status == "NOT_FOUND":
        return UnknownModel(url, model)
    if status in ("INVALID_ARGUMENT", "UNIMPLEMENTED"):
        return refusal(f"{url}: {model}", str(error.message()))
    if status == "UNAVAILABLE":
        if is_queue_full(error):
            return failed(f"{model} is overloaded: {said}.")
        return failed(f"{model} accepts no requests now: {said.rstrip('.')}. Try again later.")
    return failed(f"{model} failed ({status or 'no status'}): {said}", retry=status == "INTERNAL")


def refusal(where: str, message: str) -> SaccadeError:
    """Return the error to raise for a request that a router refuses with this message."""
    # A table of variants has several lines.
    lines = [" ".join(line.split()) for line in message.strip().splitlines()]
    said = " ".join(message.split())
    if image := _IMAGE.fullmatch(said):
        return ServerRefusedImage(where, said, int(image["index"] or 0), image["reason"])
    return SaccadeError(f"{where} refuses the request: " + "\n".join(lines))


def _not_connected(error: Any) -> tuple[str, bool]:
    """Return why there is no connection and what to do, and whether another try can help."""
    said = _in_one_line(error)
    if _NO_ADDRESS.search(said):
        return (
            f"there is no such host ({said}). Pass the server's gRPC address, HOST:PORT, "
            f"such as {EXAMPLE}."
        ), False
    if _NO_TLS.search(said):
        return (
            "the TLS handshake failed: the server may not use TLS (leave out grpcs://), or its "
            "certificate is not trusted (set GRPC_DEFAULT_SSL_ROOTS_FILE_PATH to the "
            "authority's certificate)."
        ), False
    if _NO_GRPC.search(said):
        return (
            "something listens there, but it does not speak gRPC. Pass the gRPC port, which "
            "`saccade serve` prints (8001 by default), not the port of /ready, metrics or HTTP; "
            "for a server with TLS, write grpcs://HOST:PORT."
        ), False
    return (
        f"no server answers there ({short(error)}). Start one with `saccade serve REPOSITORY`, "
        "or pass its address with --url. If it is being restarted, try again in a few seconds."
    ), True


def _died(name: str, model: str) -> str:
    if name == model:
        return (
            f"the router of {model} has died. `saccade serve` reloads it; until then no variant "
            "answers. Try again in a few seconds."
        )
    return (
        f"variant {name} failed and may have died. If so, `saccade serve` reloads it. Try again "
        "in a few seconds, or read its log. The other variants still answer."
    )


def _in_one_line(error: Any) -> str:
    return " ".join(str(error.message()).split())


def short(error: Any) -> str:
    """Return the cause of an error in a few words."""
    said = _in_one_line(error)
    if not _UNREACHABLE.search(said):
        return said.rstrip(".")
    # gRPC wraps the cause in several layers; the innermost one comes last.
    return _UNREACHABLE.findall(said)[-1].lower()
