# SPDX-License-Identifier: Apache-2.0
"""Requests that follow a policy, by the router's own code without a server."""

import threading
import time
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from support.serving.routers import (
    FakeRequest,
    execute,
    model_of,
    router_arguments,
    shade_png,
    src,
    variant_route,
)

from saccade.exporter.policy.answers import MEASURES, Answers, CalibratedVariant
from saccade.exporter.policy.certify import Chain

# The largest first, as in routes.json; a policy asks them from the last to the first.
FULL, MIDDLE, SMALL = NAMES = ("nac-b1000-fp32", "nac-b0500-fp32", "nac-b0063-fp32-long")
LOGITS = dict(zip(NAMES, np.random.default_rng(0).normal(0, 2, (3, 256, 4)), strict=True))
CHAIN, TEMPERATURES = (SMALL, MIDDLE, FULL), (0.5, 2.0, 1.0)
SHADES = np.random.default_rng(1).permutation(256)[:64]
confidence = import_module("saccade.model_repository.router.confidence").confidence
# As calibration chooses them: the confidences of samples, which are themselves sure enough.
THRESHOLDS = tuple(
    float(np.sort(confidence("top1", LOGITS[name][SHADES].astype(np.float32), warm))[32])
    for name, warm in zip(CHAIN[:2], TEMPERATURES, strict=False)
)
OUTPUTS = {
    "logits", "probabilities", "variant", "variant_sha256", "steps", "certified", "degraded",
}  # fmt: skip
DEAD = "in ensemble, Stub process 'nac' is not healthy."


def sha_of(name):
    return f"{NAMES.index(name)}" * 64


def route(at, name):
    known = {"budget": (1.0, 0.5, 0.0625)[at], "setting": name[4:9], "run_batch": 64}
    return variant_route(name, sha256=sha_of(name), **known)


def policy(name, risk, seconds, chain=CHAIN, thresholds=THRESHOLDS, measure="top1", **more):
    columns = chain, (*thresholds, None), TEMPERATURES
    steps = [
        {"variant": variant, "sha256": sha_of(variant), "threshold": threshold, "temperature": warm}
        for variant, threshold, warm in zip(*columns, strict=False)
    ]
    return {
        "name": name, "against": "full", "confidence": 0.95, "risk": risk, "bound": risk,
        "measure": measure, "full": FULL, "seconds": seconds, "steps": steps, **more,
    }  # fmt: skip


POLICIES = [
    policy("auto", 0.01, 0.4),
    policy("night", 0.05, 0.1, (SMALL, MIDDLE), (0.8,), "entropy"),
    policy("odd", 0.02, 0.5, (SMALL, FULL), (0.8,), "margin"),
    policy("never", 0.005, 0.6, (SMALL, FULL), (2.0,)),
    policy("always", 0.5, 0.2, (SMALL, FULL), (0.0,)),
    policy("sure", 0.0, 0.7, (SMALL, FULL), (0.999,)),
    policy("late", 0.03, 0.8, thresholds=(2.0, THRESHOLDS[1])),
    policy("some", 0.04, 0.9, early=[0, 2]),
]


class Request(FakeRequest):
    """A request for images of these shades, and what it asks for."""

    def __init__(self, shades=SHADES, outputs=("logits", *OUTPUTS - {"logits"}), timeout=0, **of):
        super().__init__(*map(shade_png, shades), outputs=outputs, timeout=timeout, **of)


def texts(rows):
    return [row.tobytes().rstrip(b"\0").decode() for row in rows]


@pytest.fixture
def make(pb, tmp_path):
    """Make a router; `calls` are the variants that were run and their rows.

    A variant waits in its run for its event in `go`, and fails with its words in `failing`.
    """
    made = []

    def router(policies=POLICIES, adaptive=None):
        more = {"policies": policies} if policies else {}
        more |= {"adaptive": adaptive} if adaptive else {}
        variants = [route(at, name) for at, name in enumerate(NAMES)]
        outputs = dict.fromkeys(("logits", "probabilities", "embedding"), 4)
        one = model_of(tmp_path, variants, outputs, **more)
        one.calls, one.failing, one.given = [], {}, []
        one.go = {name: threading.Event() for name in NAMES}
        one.entered = {name: threading.Event() for name in NAMES}

        def answer(asked):
            name, image = asked["model_name"], asked["inputs"][0].as_numpy()
            one.calls.append((name, len(image)))
            one.entered[name].set()
            assert one.go[name].wait(60)
            if name in one.failing:
                raise pb.TritonError(one.failing[name])
            logits = LOGITS[name][image[:, 0, 0, 0]].astype(np.float32)
            arrays = {"logits": logits, "probabilities": logits + 1, "embedding": logits}
            one.given += [(array, array.copy()) for array in arrays.values()]
            return {name: arrays[name] for name in asked["requested_output_names"]}

        pb.answer = answer
        one.initialize(router_arguments())
        made.append(one)
        return one

    yield router
    for one in made:
        for event in one.go.values():
            event.set()
        one.finalize()


@pytest.fixture
def router(make):
    """A router whose variants answer at once."""
    one = make()
    for event in one.go.values():
        event.set()
    return one


@pytest.fixture
def held(make):
    """A router whose middle variant is held, with a request in it."""
    one = make()
    for name in (SMALL, FULL):
        one.go[name].set()
    one.first = Request([0], budget="b0500")
    execute(one, [one.first])
    assert one.entered[MIDDLE].wait(60)
    return one


def offline(name, shades=SHADES):
    """Where each sample ends and its logits, as calibration computes them."""
    (found,) = [each for each in POLICIES if each["name"] == name]
    chain = [step["variant"] for step in found["steps"]]
    logits = np.stack([LOGITS[variant][shades].astype(np.float32) for variant in chain])
    measured = [
        [
            confidence(measure, values, step["temperature"])
            for values, step in zip(logits, found["steps"], strict=True)
        ]
        for measure in MEASURES
    ]
    count = len(chain)
    variants = tuple(CalibratedVariant(variant, "", 1.0, 1.0) for variant in chain)
    answers = Answers(variants, count - 1, 0, logits.argmax(-1), np.array(measured), None)
    thresholds = tuple(step["threshold"] for step in found["steps"][:-1])
    early = found.get("early")
    ends = Chain(tuple(range(count)), found["measure"], thresholds, early).ends(answers)
    return ends, logits[ends, np.arange(len(shades))], [chain[end] for end in ends]


@pytest.mark.parametrize("name", ["auto", "night", "odd", "never", "late", "some"])
def test_each_row_is_answered_as_by_the_chain_offline(router, name):
    request = Request(policy=name)
    execute(router, [request])
    ends, logits, variants = offline(name)
    assert name == "never" or len({*ends}) == len({*variants}) > 1, "rows end at different steps"
    answer = request.answer()
    np.testing.assert_array_equal(answer["logits"], logits)
    np.testing.assert_array_equal(answer["probabilities"], logits + 1)
    np.testing.assert_array_equal(answer["steps"], ends[:, None] + 1)
    assert answer["steps"].dtype == np.int32 and answer["certified"].dtype == bool
    assert texts(answer["variant"]) == variants
    assert texts(answer["variant_sha256"]) == [sha_of(variant) for variant in variants]
    assert answer["certified"].all() and answer["certified"].shape == (64, 1)
    steps = [step["variant"] for step in next(p for p in POLICIES if p["name"] == name)["steps"]]
    assert router.calls == [
        (variant, int((ends >= at).sum())) for at, variant in enumerate(steps)
    ]  # fmt: skip


def test_a_step_stops_only_with_classes_that_were_certified(router):
    request = Request(policy="some")
    execute(router, [request])
    answer = request.answer()
    given, steps = answer["logits"].argmax(-1), answer["steps"][:, 0]
    assert set(given[steps < 3]) == {0, 2} and {1, 3} <= set(given[steps == 3])
    sure, _, _ = offline("auto")
    assert (sure + 1 < steps).any(), "sure, but of another class"


@pytest.mark.parametrize("name", ["auto", "late"])
def test_the_answers_of_models_are_never_written_to(router, name):
    request = Request(policy=name)
    execute(router, [request])
    request.answer()
    assert len(router.given) == 3 * 3, "three arrays of three variants"
    for array, as_given in router.given:
        np.testing.assert_array_equal(array, as_given)


def test_rows_that_are_sure_at_once_cost_one_call(router):
    request = Request(policy="always")
    execute(router, [request])
    assert set(texts(request.answer()["variant"])) == {SMALL}
    assert router.calls == [(SMALL, 64)]


def test_an_image_is_decoded_once(router, monkeypatch):
    plain, done = src.decoding.decode, []
    monkeypatch.setattr(src.decoding, "decode", lambda *given: (done.append(1), plain(*given))[1])
    request = Request(policy="never")
    execute(router, [request])
    request.answer()
    assert len(done) == 64 and [name for name, _ in router.calls] == [SMALL, FULL]


def test_only_what_was_asked_for_is_answered(router):
    for asked in (["certified"], ["variant", "probabilities"], ["logits", "steps"]):
        request = Request(outputs=asked, policy="auto")
        execute(router, [request])
        assert set(request.answer()) == set(asked)
    # Who names no output is asked for all of the configuration by the server.
    request = Request(outputs=[*OUTPUTS, "embedding", "saccade_lanes"], policy="auto")
    execute(router, [request])
    assert set(request.answer()) == OUTPUTS


def test_a_request_without_a_policy_is_answered_as_ever(router):
    request = Request([3], budget="b0500")
    execute(router, [request])
    assert set(request.answer()) == {"logits", "probabilities", "variant", "variant_sha256"}
    assert request.answer()["variant"].tobytes().decode() == MIDDLE


def test_the_rest_shares_a_call_with_what_waits_there(held, eventually):
    request = Request(outputs=["logits"], policy="auto")
    other = Request([5, 6], budget="b0500")  # which asks for more
    execute(held, [request])
    eventually(lambda: held.lanes[MIDDLE, ""].report()["waiting"], 6)
    execute(held, [other])
    eventually(lambda: held.lanes[MIDDLE, ""]._backlog.cost[1] < 1e-6, 6)  # it is decoded
    held.go[MIDDLE].set()
    ends, logits, _ = offline("auto")
    np.testing.assert_array_equal(request.answer()["logits"], logits)
    np.testing.assert_array_equal(other.answer()["logits"], LOGITS[MIDDLE][[5, 6]].astype("f4"))
    rest = int((ends >= 1).sum())
    assert [rows for name, rows in held.calls if name == MIDDLE] == [1, rest + 2]


FAILURES = {
    DEAD: ("unavailable", "has died or is being loaded"),
    "Exceeds maximum queue size": ("unavailable", "the queue of variant"),
    "the run failed": ("internal", "failed; see the server's log"),
}


@pytest.mark.parametrize("failing", [MIDDLE, FULL])
@pytest.mark.parametrize("words", FAILURES)
def test_a_failure_in_the_chain_leaves_the_answer_before(router, failing, words):
    router.failing[failing] = words
    request, strict = Request(policy="auto"), Request(policy="auto", strict=True)
    execute(router, [request])
    ends, _, _ = offline("auto")
    reached = CHAIN.index(failing)
    answer = request.answer()
    np.testing.assert_array_equal(answer["certified"][:, 0], ends < reached)
    kept = np.minimum(ends, reached - 1)
    np.testing.assert_array_equal(answer["steps"][:, 0], kept + 1)
    assert texts(answer["variant"]) == [CHAIN[at] for at in kept]
    expected = [LOGITS[CHAIN[at]][shade] for at, shade in zip(kept, SHADES, strict=True)]
    np.testing.assert_array_equal(answer["logits"], np.array(expected, np.float32))
    execute(router, [strict])
    code, text = strict.error()
    assert code == FAILURES[words][0] and FAILURES[words][1] in text and f"'{failing}'" in text


def test_a_failure_of_the_first_step_is_the_requests(router):
    router.failing[SMALL] = DEAD
    request = Request(policy="auto")
    execute(router, [request])
    code, text = request.error()
    assert code == "unavailable" and SMALL in text and len(router.calls) == 1


@pytest.mark.parametrize("strict", ["false", "true"])
def test_time_that_runs_out_in_the_chain(held, strict, eventually, monkeypatch):
    request = Request(policy="auto", strict=strict, timeout=60_000_000)
    execute(held, [request])
    ends, _, _ = offline("auto")
    eventually(lambda: held.lanes[MIDDLE, ""].report()["waiting"], 6)
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60)
    monkeypatch.setattr(src.backlog, "time", later)
    if strict == "true":
        code, text = request.error()
        assert code == "unavailable" and "timeout" in text and MIDDLE in text
    else:
        answer = request.answer()  # while the lane is still busy
        np.testing.assert_array_equal(answer["certified"][:, 0], ends < 1)
        assert set(texts(answer["variant"])) == {SMALL}
    assert not held.go[MIDDLE].is_set()


def test_nothing_more_is_run_for_a_caller_that_has_gone(held, eventually):
    request = Request(policy="auto")
    execute(held, [request])
    eventually(lambda: held.lanes[MIDDLE, ""].report()["waiting"], 6)
    request.gone = True
    time.sleep(0.06)  # before that it is not worth asking
    held.go[MIDDLE].set()
    assert request.error() == ("cancelled", "the caller has gone")
    assert [name for name, _ in held.calls] == [MIDDLE, SMALL]


def test_a_lane_that_has_ended_is_no_reason_to_wait(make):
    """The largest variant's lane ends first; a request may still be on its way to it."""
    router = make()
    request = Request(policy="never")
    execute(router, [request])
    assert router.entered[SMALL].wait(60)
    router.lanes[FULL, ""].close()
    router.go[SMALL].set()
    assert not request.answer()["certified"].any()


def test_a_broken_image_is_the_requests_own_fault(router):
    request = Request(policy="auto")
    request.inputs()[0].as_numpy()[5, 0] = b"junk"
    execute(router, [request])
    code, text = request.error()
    assert code == "invalid" and "image 5" in text and router.calls == []


REFUSED = {
    "two choices": ({"policy": "auto", "budget": 0.5}, "budget and policy are given, expected one"),
    "two policies": ({"policy": "auto", "max_risk": 0.1}, "max_risk and policy are given"),
    "unknown": ({"policy": "lunch"}, "unknown policy 'lunch', expected one of:\nauto: risk of"),
    "no name": ({"policy": True}, "unknown policy True"),
    "risk of 1": ({"max_risk": 1}, "max_risk is 1, expected a number of at least 0 and below 1"),
    "risk in words": ({"max_risk": "low"}, "max_risk is 'low', expected"),
    "risk that is no number": ({"max_risk": "nan"}, "max_risk is 'nan', expected"),
    "truth": ({"max_risk": False}, "max_risk is False, expected"),
    "strict alone": ({"strict": True}, "found parameter strict without policy or max_risk"),
    "strict budget": ({"strict": "true", "budget": 1}, "found parameter strict without policy"),
    "half strict": ({"policy": "auto", "strict": "yes"}, "strict is 'yes', expected true or false"),
    "other": (
        {"policy": "auto", "colour": 1},
        "unknown parameter 'colour', expected one of budget,",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(router, case):
    parameters, words = REFUSED[case]
    request = Request(**parameters)
    execute(router, [request])
    code, text = request.error()
    assert code == "invalid" and words in text and router.calls == []


@pytest.mark.parametrize("policy", ["auto", "full model"])
def test_a_family_refuses_what_no_policy_covers(router, monkeypatch, policy):
    def refuse(ticket):
        raise src.choose.RequestRefused(f"no policy covers {sorted(ticket.inputs)}")

    monkeypatch.setattr(router.family, "check_followed", refuse)
    request = Request(**({"max_risk": 0} if policy == "full model" else {"policy": policy}))
    execute(router, [request])
    assert request.error() == ("invalid", "no policy covers ['image']") and router.calls == []
    plain = Request(budget=0.5)
    execute(router, [plain])
    assert plain.answer()


def test_outputs_that_variants_do_not_share_are_refused_by_name(router):
    request = Request(outputs=["logits", "embedding"], policy="auto")
    execute(router, [request])
    code, text = request.error()
    assert code == "invalid" and text.startswith("found output embedding in a request with")


@pytest.mark.parametrize("parameters", [{"policy": "auto"}, {"max_risk": 0.1}])
def test_a_router_without_policies_says_how_it_gets_some(make, parameters):
    router = make(policies=[])
    request = Request(**parameters)
    execute(router, [request])
    code, text = request.error()
    assert code == "invalid" and "saccade calibrate" in text and "saccade repository" in text


RISKS = {
    "0": (FULL,), 0: (FULL,), 0.001: (SMALL, FULL), 0.005: (SMALL, FULL), "0.01": CHAIN,
    0.02: CHAIN, 0.05: (SMALL, MIDDLE), 0.9: (SMALL, MIDDLE),
}  # fmt: skip


@pytest.mark.parametrize("risk", RISKS)
def test_the_cheapest_policy_of_a_risk_is_followed(router, risk):
    request = Request(max_risk=risk)
    execute(router, [request])
    answer = request.answer()
    assert tuple(name for name, _ in router.calls) == RISKS[risk] and answer["certified"].all()
    if RISKS[risk] == (FULL,):
        np.testing.assert_array_equal(answer["logits"], LOGITS[FULL][SHADES].astype("f4"))
        assert (answer["steps"] == 1).all()


def test_answers_are_counted_by_policy_step_and_certificate(router, pb):
    ends, _, _ = offline("auto")
    whole, broken, full = Request(policy="auto"), Request(policy="auto"), Request([1], max_risk=0)
    execute(router, [whole, full])
    whole.answer(), full.answer()
    router.failing[MIDDLE] = DEAD
    strict = Request(policy="auto", strict=True)
    execute(router, [broken, strict])
    broken.answer(), strict.error()
    router.finalize()

    def told(name, **labels):
        return pb.told.get((name, *sorted({"model": "nac", **labels}.items())), 0)

    def followed(step, certified, policy="auto", variant=None):
        return told(
            "saccade_policy_answers_total", policy=policy, step=str(step), certified=certified,
            variant=variant or CHAIN[step - 1],
        )  # fmt: skip

    at = [int((ends == step).sum()) for step in range(3)]
    assert [followed(step, "true") for step in (1, 2, 3)] == [2 * at[0], at[1], at[2]]
    assert [followed(step, "false") for step in (1, 2)] == [at[1] + at[2], 0]
    assert followed(1, "true", "full model", FULL) == 1
    # A request counts once, for the variant of its last answer.
    assert told("saccade_requests_total", outcome="answered") == 3
    assert told("saccade_requests_total", outcome="refused") == 1
    answered = {name: told("saccade_answers_total", variant=name) for name in NAMES}
    assert answered == {FULL: 2, MIDDLE: 0, SMALL: 1}
    assert told("saccade_refusals_total", variant=MIDDLE, reason="unavailable") == 1


def test_without_policies_the_page_has_no_series_of_them(make, pb):
    names = set()
    plain = pb.MetricFamily
    pb.MetricFamily = lambda *, name, **of: (names.add(name), plain(name=name, **of))[1]
    pb.MetricFamily.COUNTER = 0
    make(policies=[])
    assert "saccade_answers_total" in names and "saccade_policy_answers_total" not in names


def test_answers_of_who_is_held_back_are_the_same(make, eventually):
    router = make([
        policy("auto", 0.01, 0.4, thresholds=(2.0, 2.0)),
        policy("early", 0.05, 0.4, thresholds=(0.0, 2.0)),
    ])  # fmt: skip
    for loaded in router.routes.policies:
        for step, share in zip(loaded.steps, (0.8, 0.15, 0.05), strict=True):
            vars(step)["end_share"] = share
    for name in (SMALL, MIDDLE):
        router.go[name].set()
    seen, offer = [], router.lanes[FULL, ""].offer
    router.lanes[FULL, ""].offer = lambda one: seen.append((one.caller, one.behind)) or offer(one)
    asked = {caller: Request(policy="auto", identity=f"{caller}/9") for caller in ("hard", "usual")}
    for at in range(4):
        for caller, name in (("hard", "auto"), ("usual", "early"), ("other", "early")):
            execute(router, [Request(policy=name, identity=f"{caller}/{at}")])
    execute(router, list(asked.values()))
    eventually(lambda: len(seen), 6)
    router.go[FULL].set()
    hard, usual = (request.answer() for request in asked.values())
    assert dict(seen) == {"hard": True, "usual": False}
    for name, array in usual.items():
        np.testing.assert_array_equal(hard[name], array)
