# SPDX-License-Identifier: Apache-2.0
"""One metrics page: the metrics of the current server, and those of the supervisor.

Two servers cannot share a metrics port, so each has its own, and this relay forwards the page of
the current one. While no server runs, the page contains only the supervisor's part.
"""

import http.client
import re
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple

from saccade.serving.client.readiness import Readiness
from saccade.serving.server.addresses import address
from saccade.serving.server.http_endpoint import Answer, HttpEndpoint

_TIMEOUT_S = 2  # leaves time for the supervisor's part before the endpoint's own limit
OWN_HOST = "127.0.0.1"  # where each server exposes its metrics; callers use the relay
_PAGE = "text/plain; version=0.0.4; charset=utf-8"
_FAMILY = re.compile(r"^(?=# HELP )", re.MULTILINE)
_HISTOGRAM = re.compile(r"# HELP (saccade_\w+_seconds)_(bucket|count|sum) (.*)\n# TYPE .*\n")
_BUCKET = re.compile(r'le="([^"]*)",?')


class Watched(NamedTuple):
    """What a supervisor knows about the service that it keeps running."""

    readiness: Readiness
    restarts: int
    replacements: int
    reloads: Mapping[str, int]  # by model


class MetricsRelay(HttpEndpoint):
    """Answers `GET /metrics`; `port_of` returns the current server's port, or 0 without one."""

    def __init__(
        self, host: str, port: int, port_of: Callable[[], int], watched: Callable[[], Watched]
    ) -> None:
        def answer() -> Answer:
            own = port_of()
            status, body = metrics(own) if own else (503, b"")
            up = status == 200
            page = with_histograms(body.decode()) if up else ""
            return 200, _PAGE, (page + service_page(watched(), up=up)).encode()

        super().__init__(host, port, "--metrics-port", ("/metrics",), answer)


def metrics(port: int, timeout_s: float = _TIMEOUT_S) -> tuple[int, bytes]:
    """Return the metrics at a server's own port, or 503 if it does not answer."""
    connection = http.client.HTTPConnection(address(OWN_HOST, port), timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return 503, f"the server's metrics cannot be read ({error})\n".encode()
    finally:
        connection.close()


def with_histograms(page: str) -> str:
    """Return the page with the router's histograms, which the server exposes as counters."""
    others: list[str] = []
    histograms: dict[str, dict[str, str]] = {}
    for family in _FAMILY.split(page):
        if head := _HISTOGRAM.match(family):
            name, part, description = head.groups()
            parts = histograms.setdefault(name, {"": description})
            parts[part] = family[head.end() :]
        else:
            others.append(family)
    for name, parts in histograms.items():
        buckets = sorted(parts.get("bucket", "").splitlines(), key=_bucket_order)
        others += [f"# HELP {name} {parts['']}\n# TYPE {name} histogram\n"]
        others += [f"{line}\n" for line in buckets]
        others += [parts.get("sum", ""), parts.get("count", "")]
    return "".join(others)


def _bucket_order(line: str) -> tuple[str, float]:
    edge = _BUCKET.search(line)
    labels = _BUCKET.sub("", line.rpartition(" ")[0])
    return labels, float(edge[1]) if edge else 0.0


def service_page(watched: Watched, *, up: bool) -> str:
    """Return the supervisor's part; `up` is whether the server's own metrics were read."""
    readiness, reloads = watched.readiness, watched.reloads
    whole = f'model="{escaped(readiness.model)}"'
    of_variant = {name: f'{whole},variant="{escaped(name)}"' for name in readiness.variants}
    answering = {labels: readiness.variants[name] for name, labels in of_variant.items()}
    reloaded = {labels: reloads.get(name, 0) for name, labels in of_variant.items()}
    served = {f'{whole},sha256="{readiness.repository}"': 1}
    families: dict[str, tuple[str, Mapping[str, int]]] = {
        "repository_info": ("SHA-256 of the served repository's saccade.json; always 1", served),
        "server_up": ("1 if the server's own metrics were read", {whole: up}),
        "ready": ("1 if /ready answers 200", {whole: readiness.ready}),
        "router_ready": ("1 if the router answered its last probe", {whole: readiness.router}),
        "variant_ready": ("1 if the variant answered its last probe", answering),
        "server_restarts_total": (
            "Restarts of the server after it died or hung",
            {whole: watched.restarts},
        ),
        "server_replacements_total": (
            "Running servers that were replaced by a new one",
            {whole: watched.replacements},
        ),
        "router_reloads_total": (
            "Reloads of the router after its process died",
            {whole: reloads.get(readiness.model, 0)},
        ),
        "variant_reloads_total": (
            "Reloads of a variant after its process died",
            reloaded,
        ),
    }
    lines = []
    for name, (description, samples) in families.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP saccade_{name} {description}", f"# TYPE saccade_{name} {kind}"]
        lines += [f"saccade_{name}{{{labels}}} {value:d}" for labels, value in samples.items()]
    return "".join(f"{line}\n" for line in lines)


def escaped(text: str) -> str:
    """Escape text for the value of a label."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def hold_port() -> socket.socket:
    """Return a socket that reserves a free port, which a process that knows it can still use."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((OWN_HOST, 0))
    return held
