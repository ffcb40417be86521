# SPDX-License-Identifier: Apache-2.0
"""Load-adaptive choice by the router's own code without a server: answers, marks and counters."""

from types import SimpleNamespace

import pytest
import test_relay
from support.serving.routers import execute, src
from test_relay import DEAD, FULL, MIDDLE, OUTPUTS, POLICIES, SHADES, SMALL, Request, policy, texts

make = test_relay.make
SLO = {"slo_ms": 60_000.0, "floor_budget": None, "shares": {}}
SAFE = policy("safe", 0.01, 0.4, (SMALL, FULL), (0.5,))


@pytest.fixture
def adaptive(make):
    """A router with an objective; `late` are the candidates that seem too slow."""
    router = make([SAFE], SLO)
    for event in router.go.values():
        event.set()
    router.queue.close()
    router.late = set()
    forecast = router.adaptive.forecast
    forecast.answer_s = lambda candidate, ticket: 1e6 if candidate.name in router.late else 0.0
    forecast.seems_slow = lambda *_: False
    return router


def answer_of(router, shades=(1, 2, 3), outputs=tuple(OUTPUTS), **parameters):
    request = Request(shades, outputs, **parameters)
    execute(router, [request])
    return request.answer()


def marks(answer):
    return [(answer[name].dtype.name, set(answer[name].ravel())) for name in
            ("steps", "certified", "degraded")]  # fmt: skip


def test_without_load_the_full_model_answers(adaptive):
    answer = answer_of(adaptive)
    assert set(texts(answer["variant"])) == {FULL} and answer["degraded"].shape == (3, 1)
    assert marks(answer) == [("int32", {1}), ("bool", {True}), ("bool", {False})]


def test_under_load_a_policy_answers_and_says_so(adaptive):
    adaptive.late = {FULL}
    answer = answer_of(adaptive, SHADES)
    assert set(texts(answer["variant"])) == {SMALL, FULL}
    assert marks(answer) == [("int32", {1, 2}), ("bool", {True}), ("bool", {True})]


def test_under_more_load_a_smaller_budget_answers_without_a_certificate(adaptive):
    adaptive.late = {FULL, "safe"}
    answer = answer_of(adaptive)
    assert set(texts(answer["variant"])) == {MIDDLE}
    assert marks(answer) == [("int32", {1}), ("bool", {False}), ("bool", {True})]


def test_a_request_waits_for_its_choice_until_the_group_before_it_has_ended(adaptive):
    adaptive.go[FULL].clear()
    requests = [Request([shade]) for shade in (1, 2)]
    for request in requests:
        execute(adaptive, [request])
    assert adaptive.adaptive._backlog.requests == 1
    adaptive.late = {FULL, "safe"}
    adaptive.go[FULL].set()
    names = [set(texts(request.answer()["variant"])) for request in requests]
    assert names == [{FULL}, {MIDDLE}]


def test_if_nothing_is_in_time_the_request_is_refused_at_once(adaptive):
    adaptive.late = {FULL, "safe", MIDDLE, SMALL}
    request = Request([1])
    execute(adaptive, [request])
    code, text = request.error()
    assert code == "unavailable" and text.startswith("model 'nac' is busy") and "try" in text
    assert adaptive.calls == []


def test_what_waited_too_long_in_the_servers_queue_is_refused_unread(adaptive):
    adaptive.adaptive._lag_s = lambda: 1.0
    for timeout, budget, code in ((900_000, {}, "unavailable"), (30_000_000, {}, None),
                                  (900_000, {"budget": 1}, None)):  # fmt: skip
        request, read = Request([1], timeout=timeout, **budget), []
        (tensor,) = request.inputs()
        own = tensor.as_numpy
        tensor.as_numpy = lambda own=own, read=read: read.append(1) or own()
        execute(adaptive, [request])
        if code is None:
            assert request.answer() and read
        else:
            assert request.error()[0] == code and "server's queue" in request.error()[1]
            assert not read


def test_the_callers_time_runs_from_when_the_server_received_the_request(adaptive):
    offered = []
    adaptive._offer = lambda ticket, route: offered.append(ticket.left_s)
    adaptive._lag_s = lambda: 1_000.0  # after it, the router received the request
    for named in ({}, {"budget": 1}):
        execute(adaptive, [Request([1], timeout=3_000_000_000, **named)])
    adapts, fixed = offered
    assert 1_000 < adapts <= 2_000 < fixed <= 3_000


def test_equal_parameters_are_read_once_and_few_are_kept(adaptive):
    for named in ({"budget": 1}, {"budget": 1}, {"budget": 0.5}, {"mood": "good"}, {"mood": "good"},
                  {"budget": "b" * 600}):  # fmt: skip
        execute(adaptive, [Request([1], **named)])
    kept = adaptive.answering._kept_choice.cache_info()
    assert (kept.hits, kept.currsize) == (1, 2) and kept.maxsize == 256


@pytest.mark.parametrize("parameters", [{"budget": 1}, {"budget": "b1000"}])
def test_a_request_that_names_a_budget_is_never_changed(adaptive, parameters):
    adaptive.late = {FULL, "safe"}
    answer = answer_of(adaptive, **parameters)
    assert set(texts(answer["variant"])) == {FULL}
    assert set(answer) == OUTPUTS - {"steps", "certified", "degraded"}


@pytest.mark.parametrize("outputs", [["embedding", "variant"], [*OUTPUTS, "embedding"]])
def test_outputs_that_variants_do_not_share_are_never_changed(adaptive, outputs):
    adaptive.late = {FULL, "safe"}
    answer = answer_of(adaptive, outputs=outputs)
    assert set(texts(answer["variant"])) == {FULL} and "degraded" not in answer


def test_a_risk_is_kept_or_the_request_is_refused(adaptive):
    adaptive.late = {"full model"}
    answer = answer_of(adaptive, max_risk=0.01)
    assert answer["degraded"].all() and answer["certified"].all()
    assert adaptive.calls[0][0] == SMALL
    for late, risk in (({"full model", "safe"}, 0.01), ({"full model"}, 0.001)):
        adaptive.late = late
        adaptive.adaptive.forget()
        request = Request([1], max_risk=risk)
        execute(adaptive, [request])
        assert request.error()[0] == "unavailable"


def test_a_named_policy_is_not_degraded(adaptive):
    answer = answer_of(adaptive, policy="safe")
    assert not answer["degraded"].any() and answer["certified"].all()


def test_in_other_repositories_nothing_adapts_by_itself(make):
    router = make([SAFE])
    for event in router.go.values():
        event.set()
    assert set(answer_of(router)) == OUTPUTS - {"steps", "certified", "degraded"}
    assert not answer_of(router, policy="safe")["degraded"].any()
    request = Request([1], max_latency_ms=5)
    execute(router, [request])
    assert "max_latency_ms needs measured latencies" in request.error()[1]
    assert not answer_of(router, max_risk=0.01, max_latency_ms=50_000)["degraded"].any()


def test_a_step_that_would_be_late_is_not_waited_for(adaptive, monkeypatch):
    """The lane of the second step is busy: the answer of the first is there in time."""
    adaptive.late = {FULL}
    lane = adaptive.lanes[FULL, ""]
    asked = []

    def offer(ticket):
        asked.append(ticket.left_s)
        src.calls.refuse(ticket.sender, "busy", src.outcomes.BUSY)

    monkeypatch.setattr(lane, "offer", offer)
    answer = answer_of(adaptive, SHADES)
    assert set(texts(answer["variant"])) == {SMALL} and asked[0] <= 60
    assert {*answer["certified"].ravel()} == {True, False} and answer["degraded"].all()
    answer_of(adaptive, SHADES, policy="safe")
    assert asked[1] == float("inf"), "a certified answer has the caller's own time"


def test_a_chain_with_a_variant_below_the_floor_is_waited_for(make):
    router = make([SAFE], {**SLO, "floor_budget": 0.5})
    chain = router.answering.chains["safe"]
    assert not router._may_end(chain) and router._may_end(chain[1:])


def test_shares_are_learned_from_answers(adaptive, eventually):
    adaptive.late = {FULL}
    reach = adaptive.adaptive.forecast._reach["safe"]
    before = reach.shares
    adaptive.failing[FULL] = DEAD
    answer_of(adaptive, SHADES)
    assert reach.shares == before, "a chain that was cut short tells nothing"
    del adaptive.failing[FULL]
    answer_of(adaptive, SHADES)
    eventually(lambda: reach.shares != before, True)


def test_choices_are_counted(adaptive, pb):
    answer_of(adaptive)
    adaptive.late = {FULL}
    answer_of(adaptive, SHADES)
    adaptive.late = {FULL, "safe"}
    adaptive.adaptive.forget()
    answer_of(adaptive)
    answer_of(adaptive, budget=1)
    adaptive.finalize()
    name = "saccade_adaptive_answers_total"
    told = {key[1:]: value for key, value in pb.told.items() if key[0] == name}
    assert told == {
        (("choice", FULL), ("degraded", "false"), ("model", "nac")): 1,
        (("choice", "safe"), ("degraded", "true"), ("model", "nac")): 1,
        (("choice", MIDDLE), ("degraded", "true"), ("model", "nac")): 1,
    }


def test_every_choice_has_a_counter(make):
    router = make(POLICIES, SLO)
    choices = {choice for choice, _ in router.metrics._adapted}
    assert {FULL, MIDDLE, SMALL, "full model", *(each["name"] for each in POLICIES)} == choices
    assert make([]).metrics._adapted == {}


def test_the_router_measures_the_servers_queue(make, pb, eventually):
    """A probe goes through the server's queue to the router itself."""
    import threading
    import time

    router, go, asked = make([SAFE], SLO), threading.Event(), []

    def answer(given):
        asked.append((given["parameters"], given["requested_output_names"]))
        assert go.wait(60)
        return {}

    pb.answer = answer
    assert router.queue.lag_s == 0
    eventually(lambda: len(asked), 1)
    assert asked[0] == ({"saccade_probe": "lag"}, ["saccade_lanes"])
    time.sleep(0.1)
    assert router.queue.lag_s >= 0.1, "while the probe is under way"
    go.set()
    eventually(lambda: len(asked) > 2, True)
    eventually(lambda: router.queue.lag_s < 0.1, True)  # a single pause is no queue


@pytest.mark.parametrize(("lag_s", "pause_s"), [(0.0, 0.1), (0.01, 0.05)])
def test_a_queue_is_probed_more_often_while_requests_wait_in_it(
    make, pb, monkeypatch, lag_s, pause_s
):
    queue, pauses, now = make([SAFE], SLO).queue, [], [0.0]
    queue.close()
    monkeypatch.setattr(src.forecast, "time", SimpleNamespace(monotonic=lambda: now[0]))
    queue._used_s = float("inf")  # requests adapt now
    queue._ended = SimpleNamespace(
        wait=lambda seconds: pauses.append(seconds) or len(pauses) > 2, set=lambda: None
    )

    def answer(given):
        now[0] += lag_s
        return {}

    pb.answer = answer
    queue._serve()
    assert pauses == [0.1, pause_s, pause_s]


def test_without_an_objective_no_probe_is_sent(make):
    assert make([SAFE]).queue is None
