# SPDX-License-Identifier: Apache-2.0
"""Requests over HTTP that come from a page of another site, in a browser on this machine."""

import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from email.message import Message
from functools import lru_cache
from urllib.parse import urlsplit


def foreign(headers: Message | Mapping[str, str], *, any_host: bool = False) -> str:
    """Return why a request seems to come from a page of another site; empty if it does not.

    With DNS rebinding, the host name of a foreign page resolves to this machine, and the browser
    lets that page read our answers. Only an address or this machine's own name is therefore
    accepted as host, except with `any_host`, where a caller needs more than to reach us.
    """
    host = headers.get("host", "")
    if host and not any_host and not _is_own(host):
        return f"Host {host!r:.80} is neither an address nor a name of this machine"
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return f"Origin {origin!r:.80} is another site"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return "the request comes from a page of another site"
    return ""


@lru_cache
def _is_own(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or host
    except ValueError:  # half of the brackets of an IPv6 address
        return False
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return name.rstrip(".").lower() in ("localhost", socket.gethostname().lower())
