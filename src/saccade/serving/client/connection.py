# SPDX-License-Identifier: Apache-2.0
"""Connections to a server that may be restarted under them."""

import ipaddress
from typing import Any

_LARGEST_MESSAGE = 2**31 - 1
# Before an address: over TLS. Whom to trust beyond the usual authorities is gRPC's own setting,
# the environment's GRPC_DEFAULT_SSL_ROOTS_FILE_PATH.
TLS = "grpcs://"


def connect(url: str, **options: int) -> Any:
    """A blocking gRPC connection; nothing is sent before the first call."""
    from tritonclient.grpc import InferenceServerClient

    place = url.removeprefix(TLS)
    return InferenceServerClient(place, ssl=place != url, channel_args=_arguments(place, options))


def connect_asyncio(url: str) -> Any:
    """The same for the running event loop."""
    from tritonclient.grpc.aio import InferenceServerClient

    place = url.removeprefix(TLS)
    return InferenceServerClient(place, ssl=place != url, channel_args=_arguments(place, {}))


def connect_alone(url: str) -> Any:
    """A connection that shares nothing, such as waits between attempts, with others."""
    return connect(url, **{"grpc.use_local_subchannel_pool": 1})


def _arguments(url: str, options: dict[str, int]) -> list[tuple[str, int]]:
    arguments = {
        "grpc.max_send_message_length": _LARGEST_MESSAGE,
        "grpc.max_receive_message_length": _LARGEST_MESSAGE,
        # The default waits up to two minutes before it tries again to connect.
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.max_reconnect_backoff_ms": 1000,
    }
    if is_loopback(url.rpartition(":")[0].strip("[]")):
        # A proxy of the environment is never between two programs of one machine.
        arguments["grpc.enable_http_proxy"] = 0
    return list({**arguments, **options}.items())


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
