# SPDX-License-Identifier: Apache-2.0
"""Connections to a server that may restart while they are open."""

import ipaddress
from typing import Any

from saccade.core.errors import SaccadeError

_LARGEST_MESSAGE = 2**31 - 1
# This prefix of an address means TLS. To trust more than the usual authorities, set gRPC's own
# environment variable GRPC_DEFAULT_SSL_ROOTS_FILE_PATH.
TLS = "grpcs://"
EXAMPLE = "127.0.0.1:8001"
_GRPC_FORMS = ("dns:", "ipv4:", "ipv6:", "unix:")


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

    return InferenceServerClient(place, ssl=place != url, channel_args=_arguments(place, options))


def connect_asyncio(url: str) -> Any:
    """Return an asyncio gRPC client for the running event loop."""
    place = check_url(url)
    from tritonclient.grpc.aio import InferenceServerClient

    return InferenceServerClient(place, ssl=place != url, channel_args=_arguments(place, {}))


def connect_alone(url: str) -> Any:
    """Return a client that shares nothing with others, such as the waits between attempts."""
    return connect(url, **{"grpc.use_local_subchannel_pool": 1})


def _arguments(url: str, options: dict[str, int]) -> list[tuple[str, int]]:
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
