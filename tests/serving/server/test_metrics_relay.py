# SPDX-License-Identifier: Apache-2.0
"""One page of metrics: the present server's with histograms as such, and the supervisor's part."""

from contextlib import contextmanager

import pytest
from metric_pages import numbers_in, page_of, types_in

from saccade.serving.client.readiness import Readiness
from saccade.serving.server.http_endpoint import HttpEndpoint, MetricsRelay, Watched, service_page

ONE, TWO = "m-b0500-fp32", "m-b1000-fp32"
HALF_DEAD = Readiness("serving", "m", True, {ONE: False, TWO: True}, repository="ab12")
WATCHED = Watched(HALF_DEAD, restarts=3, replacements=2, reloads={"m": 4, ONE: 5, "gone": 6})
# As the server prints them: counters, in no order.
COUNTERS = """# HELP nv_inference_count Number of inferences
# TYPE nv_inference_count counter
nv_inference_count{model="m",version="1"} 7
# HELP saccade_waiting_seconds_bucket Time that a request waited
# TYPE saccade_waiting_seconds_bucket counter
saccade_waiting_seconds_bucket{le="+Inf",model="m",variant="b"} 3
saccade_waiting_seconds_bucket{le="0.5",model="m",variant="a"} 1
saccade_waiting_seconds_bucket{le="+Inf",model="m",variant="a"} 2
saccade_waiting_seconds_bucket{le="0.5",model="m",variant="b"} 3
# HELP saccade_waiting_seconds_sum Time that a request waited
# TYPE saccade_waiting_seconds_sum counter
saccade_waiting_seconds_sum{model="m",variant="a"} 9.5
saccade_waiting_seconds_sum{model="m",variant="b"} 0.1
# HELP saccade_waiting_seconds_count Time that a request waited
# TYPE saccade_waiting_seconds_count counter
saccade_waiting_seconds_count{model="m",variant="a"} 2
saccade_waiting_seconds_count{model="m",variant="b"} 3
# HELP saccade_answers_total Requests that a variant answered
# TYPE saccade_answers_total counter
saccade_answers_total{model="m",variant="a"} 2
"""


@contextmanager
def relayed(own_page):
    """The URL of a relay before a server with this page; None: none runs."""
    own = HttpEndpoint(
        *("127.0.0.1", 0, "--x", ("/metrics",)),
        lambda: (200 if own_page else 503, "text/plain", (own_page or "").encode()),
    )
    relay = MetricsRelay(
        "127.0.0.1", 0, lambda: 0 if own_page is None else own.port, lambda: WATCHED
    )
    try:
        yield f"http://127.0.0.1:{relay.port}/metrics"
    finally:
        relay.close()
        own.close()


def test_buckets_are_handed_on_as_a_histogram():
    with relayed(COUNTERS) as url:
        page = page_of(url)
    types, number = types_in(page), numbers_in(page)
    assert types["saccade_waiting_seconds"] == "histogram"
    assert types["nv_inference_count"] == types["saccade_answers"] == "counter"
    buckets = [line for line in page.splitlines() if line.startswith("saccade_waiting_seconds_b")]
    assert [line.partition(" ")[2] for line in buckets] == ["1", "2", "3", "3"]
    assert number("saccade_waiting_seconds_sum", variant="a") == 9.5
    assert number("saccade_waiting_seconds_count") == 5
    assert number("nv_inference_count_total", model="m") == 7  # the parser's name
    assert number("saccade_answers_total", model="m", variant="a") == 2
    assert number("saccade_server_up", model="m") == 1


@pytest.mark.parametrize("own_page", [None, ""], ids=["no server", "a server that says nothing"])
def test_restarts_and_readiness_are_said_while_no_server_is(own_page):
    with relayed(own_page) as url:
        page = page_of(url)
    number = numbers_in(page)
    assert number("saccade_server_up", model="m") == number("saccade_ready", model="m") == 0
    assert number("saccade_repository_info", model="m", sha256="ab12") == 1
    assert number("saccade_variant_ready", variant=ONE) == 0
    assert number("saccade_variant_ready", variant=TWO) == number("saccade_router_ready") == 1
    assert number("saccade_server_restarts_total", model="m") == 3
    assert number("saccade_server_replacements_total", model="m") == 2
    assert number("saccade_router_reloads_total", model="m") == 4
    assert number("saccade_variant_reloads_total", variant=ONE) == 5
    assert number("saccade_variant_reloads_total", variant=TWO) == 0
    assert "gone" not in page, "what is no longer served"


def test_any_name_is_a_label():
    odd = 'a"b\\c'
    page = service_page(WATCHED._replace(readiness=Readiness("serving", odd, True, {})), up=True)
    assert numbers_in(page)("saccade_ready", model=odd) == 1
