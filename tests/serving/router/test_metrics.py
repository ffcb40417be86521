# SPDX-License-Identifier: Apache-2.0
"""The router's metrics: what a served page says of good and bad requests, and how it is counted."""

import threading

import pytest
from metric_pages import numbers_in, page_of, types_in
from support.serving.routers import src

from saccade.core.errors import SaccadeError

HISTOGRAMS = ("saccade_waiting_seconds", "saccade_decode_seconds", "saccade_model_seconds")


def test_junk_is_refused_by_reason_and_no_answer(server, client, digit, eventually):
    before = numbers_in(page_of(server.metrics_url))
    variant = client.classify([digit])[0].variant
    for _ in range(2):
        client.classify([digit])
    for _ in range(10):
        with pytest.raises(SaccadeError, match="JPEG, PNG or WebP"):
            client.classify([b"junk"])
    with pytest.raises(SaccadeError, match="needs measured scores"):
        client.classify([digit], min_score=1.0)

    def more(name, **labels):
        return numbers_in(page_of(server.metrics_url))(name, **labels) - before(name, **labels)

    total, refusals = "saccade_requests_total", "saccade_refusals_total"
    eventually(lambda: more(total) >= 14, 5)
    assert more(total, outcome="answered") == 3 and more(total, outcome="failed") == 0
    assert more(total, outcome="refused") == more(refusals) == 11
    assert more(refusals, variant=variant, reason="invalid_image") == 10
    assert more(refusals, variant="", reason="invalid_request") == 1
    assert more("saccade_answers_total", variant=variant) == more("saccade_answers_total") == 3
    assert more("saccade_failures_total") == 0
    # Junk waits in the lane, but is not decoded, and nothing is run for it.
    for name, requests in zip(HISTOGRAMS, (13, 3, 3), strict=True):
        assert more(f"{name}_count", variant=variant) == requests
        assert more(f"{name}_bucket", variant=variant, le="+Inf") == requests
        assert more(f"{name}_sum", variant=variant) > 0


def test_the_page_is_whole_from_the_start(server, eventually):
    """A series that begins with its first event has no rate of it."""
    # On a busy machine a variant may be late for the supervisor, and not ready for a moment.
    eventually(lambda: numbers_in(page_of(server.metrics_url))("saccade_ready") == 1, 5)
    page = page_of(server.metrics_url)
    types, number = types_in(page), numbers_in(page)
    assert [types[name] for name in HISTOGRAMS] == ["histogram"] * 3
    for variant in server.variants:
        assert number("saccade_variant_ready", variant=variant) in (0, 1)
        assert number("saccade_answers_total", variant=variant) >= 0
        for reason in ("busy", "queue_full", "timeout", "unavailable", "caller_gone"):
            assert number("saccade_refusals_total", variant=variant, reason=reason) >= 0
    assert number("saccade_server_up") == 1 and number("saccade_router_ready") in (0, 1)
    assert number("saccade_server_restarts_total") == server.restarts
    assert number("saccade_variant_reloads_total") == server.reloads
    assert "nv_inference_request_success" in types


@pytest.fixture
def tally(pb, monkeypatch):
    """A tally that tells without waiting; `told` are the server's numbers by name and labels."""
    monkeypatch.setattr(src.metrics, "EVERY_S", 0.01)
    made = src.metrics.Tally()
    made.told, made.bounds = pb.told, src.metrics.BOUNDS
    yield made
    made.close()


def test_a_duration_is_in_every_bucket_that_is_wide_enough(tally):
    histogram = tally.histogram("x_seconds", "A time", model="m")
    for seconds in (0.0001, 0.0005, 0.0006, 2.5, 1e6):
        histogram.add(seconds)
    tally.start()
    tally.close()
    within = [
        tally.told.get(("x_seconds_bucket", ("le", str(edge)), ("model", "m")), 0)
        for edge in (*tally.bounds, "+Inf")
    ]
    assert within == [2, *[3] * 10, *[4] * 5, 5]
    assert tally.told["x_seconds_count", ("model", "m")] == 5
    assert tally.told["x_seconds_sum", ("model", "m")] == pytest.approx(1e6 + 2.5012)


def test_no_bucket_is_ever_told_as_larger_than_a_wider_one(tally, pb, monkeypatch):
    histogram = tally.histogram("x_seconds", "A time", model="m")
    order = []
    monkeypatch.setattr(pb, "telling", lambda key: order.append(dict(key[1:]).get("le", key[0])))
    histogram.add(20.0)
    tally.start()
    tally.close()
    assert order == ["x_seconds_count", "+Inf", "60.0", "30.0", "x_seconds_sum"]


def test_what_could_not_be_told_is_told_later(tally, pb, monkeypatch, eventually):
    """As where the server finds no shared memory for a moment."""
    first, second = (tally.counter("x_total", "A number", of=name) for name in "ab")
    failing = threading.Event()
    failing.set()

    def fail(key):
        if failing.is_set() and ("of", "b") in key:
            raise RuntimeError("no room")

    monkeypatch.setattr(pb, "telling", fail)
    first.add(2)
    second.add(3)
    tally.start()
    eventually(lambda: any("no room" in line for line in pb.log), 1)
    with tally.lock:
        second.add(4)
    failing.clear()
    key = ("x_total", ("of", "b"))
    eventually(lambda: tally.told.get(key) == 7, 1)
    assert tally.told["x_total", ("of", "a")] == 2


def test_numbers_that_cannot_be_told_are_added_up(tally, pb, monkeypatch, eventually):
    """Otherwise the router's memory would grow for as long as the server takes no number."""
    counter = tally.counter("x_total", "A number")

    def fail(key):
        raise RuntimeError("no room")

    monkeypatch.setattr(pb, "telling", fail)
    tally.start()
    for tries in range(1, 6):
        with tally.lock:
            counter.add()
        eventually(lambda tries=tries: len(pb.log) >= 2 * tries, 1)
    assert len(tally._untold) == 1
    monkeypatch.setattr(pb, "telling", lambda key: None)
    eventually(lambda: tally.told.get(("x_total",)) == 5, 1)
