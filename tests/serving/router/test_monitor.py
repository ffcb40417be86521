# SPDX-License-Identifier: Apache-2.0
"""The monitor of policies, by the router's own code without a server."""

import json
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from picture_files import png
from support.serving.routers import (
    PREPROCESSING,
    FakeRequest,
    execute,
    model_of,
    router_arguments,
    src,
    variant_route,
)

FULL, SMALL = "nac-b1000-fp32", "nac-b0063-fp32"
# Both answer class 0 or 1 by the shade of an image. The small one is sure of shades below 128, and
# is wrong from LOST on, up to there.
LOST, UNSURE = 100, 128


def small(shade):
    wrong = LOST <= shade < UNSURE
    return [0.0, 9.0] if wrong else [9.0, 0.0] if shade < UNSURE else [0.1, 0.0]


def policy(name="auto", chain=(SMALL, FULL), **fields):
    steps = [
        {"variant": one, "sha256": "0" * 64, "threshold": 0.9 if one != chain[-1] else None,
         "temperature": 1.0}
        for one in chain
    ]  # fmt: skip
    return {
        "name": name, "against": "full", "confidence": 0.95, "risk": 0.01, "bound": 0.008,
        "measure": "top1", "full": FULL, "seconds": 0.4, "steps": steps, **fields,
    }  # fmt: skip


def limit(**fields):
    return {"rate": 0.01, "alpha": 0.05, "min_ari": None, **fields}


def picture(shade):
    return png(np.full((8, 8), shade, np.uint8))


class Request(FakeRequest):
    """A request for images of these shades, by default with the policy."""

    def __init__(self, *shades, outputs=("variant", "certified", "steps"), **of):
        of = of or {"policy": "auto"}
        super().__init__(*map(picture, shades), outputs=outputs, **of)


@pytest.fixture
def make(pb, tmp_path, monkeypatch):
    """Make a router that samples all answers; `calls` are the variants that were run, and rows.

    The full model waits in its run for `go`, and fails if `broken` is set.
    """
    made = []
    monkeypatch.setenv("SACCADE_RUN_FOLDER", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()

    def router(policies=None, share=1.0, keep=None, limits=None, pause=0.0, process=(), **more):
        policies = [policy()] if policies is None else policies
        names = {one["name"]: limit() for one in policies}
        monitor = {"share": share, "limits": limits or names, "keep": keep}
        variants = [
            variant_route(FULL, budget=1.0, setting="b1000"),
            variant_route(SMALL, budget=0.0625, setting="b0063"),
        ]
        outputs = {"logits": 2, "probabilities": 2}
        place = tmp_path / f"router{len(made)}"
        place.mkdir()
        one = model_of(place, variants, outputs, policies=policies, monitor=monitor, **more)
        one.calls, one.sides, one.go = [], [], threading.Event()
        one.broken, one.slow_s = False, 0.0
        one.go.set()

        def answer(asked):
            name, image = asked["model_name"], asked["inputs"][0].as_numpy()
            one.calls.append((name, len(image)))
            one.sides.append(image.shape[1])
            if name == FULL:
                assert one.go.wait(60)
                time.sleep(one.slow_s)
                if one.broken:
                    raise pb.TritonError("in ensemble, Stub process 'nac' is not healthy.")
            rows = [[9.0, 0.0] if name == FULL else small(shade) for shade in image[:, 0, 0, 0]]
            logits = np.array(rows, np.float32)
            arrays = {"logits": logits, "probabilities": logits}
            return {name: arrays[name] for name in asked["requested_output_names"]}

        pb.answer = answer
        monkeypatch.setattr(src.monitor, "PAUSE_TIMES", pause)
        one.initialize(router_arguments(*process))
        made.append(one)
        return one

    yield router
    for one in made:
        one.go.set()
        one.finalize()


def samples(router, name="auto"):
    one = router.monitor._evidence.get(name)
    return one and (one.samples, one.lost)


def comes(eventually, router, expected, name="auto"):
    """Wait for numbers of samples and lost ones, or for the end of the policy."""
    eventually(lambda: samples(router, name) in (None, expected), 3)


def send(router, *shades, **of):
    request = Request(*shades, **of)
    execute(router, [request])
    return request


def variant_of(request):
    return {row.tobytes().rstrip(b"\0").decode() for row in request.answer()["variant"]}


def test_a_sample_is_compared_with_the_full_model(make, eventually):
    router = make()
    for at, (shade, lost) in enumerate([(3, 0), (LOST, 1), (5, 1), (LOST, 2)], 1):
        assert set(send(router, shade).answer()) == {"variant", "certified", "steps"}
        comes(eventually, router, (at, lost))
    assert router.calls == [(SMALL, 1), (FULL, 1)] * 4


def test_an_answer_of_the_full_model_counts_without_a_call(make, eventually):
    router = make()
    assert variant_of(send(router, UNSURE)) == {FULL}
    eventually(lambda: samples(router) == (1, 0), 3)
    assert router.calls == [(SMALL, 1), (FULL, 1)]


def test_the_full_model_gets_images_of_its_own_size(make, eventually, monkeypatch):
    """The small variant's pixels are not the full model's: the file is decoded again."""
    router = make()
    own = {**PREPROCESSING, "width_px": 4, "height_px": 4, "resize_px": [4, 4]}
    wanted = src.image_decoding.ImageInput.from_dict(own)
    monkeypatch.setitem(router.answering.images, FULL, wanted)
    send(router, LOST).answer()
    comes(eventually, router, (1, 1))
    assert router.sides == [8, 4]


def test_a_policy_of_one_cheap_variant_is_monitored(make, eventually):
    router = make([policy(chain=(SMALL,))])
    send(router, LOST).answer()
    eventually(lambda: samples(router) == (1, 1), 3)
    assert set(send(router, 3, outputs=["variant"], policy="auto").answer()) == {"variant"}
    eventually(lambda: samples(router) == (2, 1), 3)


def test_one_row_of_a_request_is_drawn(make, eventually):
    router = make()
    rows = []
    router.monitor._random = SimpleNamespace(random=lambda: 0.5, randrange=lambda n: rows[-1])
    for at, (row, lost) in enumerate([(0, 0), (2, 1), (1, 1), (3, 1)], 1):
        rows.append(row)
        send(router, 3, 4, LOST, UNSURE).answer()
        comes(eventually, router, (at, lost))
    assert [call for call in router.calls if call == (FULL, 1)] == [(FULL, 1)] * (4 + 3)


def test_rows_are_sampled_at_the_stated_share(make, eventually):
    router = make(share=0.005)
    router.monitor._random = SimpleNamespace(random=lambda: 0.03, randrange=lambda n: 0)
    for count, drawn in ((1, 0), (5, 0), (6, 0), (7, 1), (64, 2)):
        send(router, *[3] * count).answer()
        comes(eventually, router, (drawn, 0))


def test_a_share_of_zero_samples_nothing(make):
    router = make(share=0.0)
    send(router, LOST).answer()
    time.sleep(0.1)
    assert samples(router) == (0, 0) and router.calls == [(SMALL, 1)]


def lose(router, eventually, name="auto", shade=LOST):
    """Send lost answers until the policy is withdrawn."""
    before = samples(router, name)
    for at in range(1, 50):
        send(router, shade, policy=name).answer()
        comes(eventually, router, (before[0] + at, before[1] + at), name)
        if name in router.routes.withdrawn:
            return
    raise AssertionError("not withdrawn")


def test_the_full_model_answers_for_a_withdrawn_policy(make, eventually, pb):
    router = make()
    lose(router, eventually)
    request = send(router, LOST)
    assert variant_of(request) == {FULL} and request.answer()["certified"].all()
    text = router.routes.withdrawn["auto"]
    lost = len([call for call in router.calls if call[0] == SMALL])
    assert text == (
        f"policy 'auto' was withdrawn: {lost} of its last {lost} sampled answers (100.0%) differed "
        f"from the full model's, expected at most 1.00%; of all {lost} samples, {lost} did"
    )
    assert any(line.startswith(text) and "Calibrate on images like" in line for line in pb.log)
    router.finalize()
    told = {key[0]: value for key, value in pb.told.items() if ("policy", "auto") in key}
    assert told["saccade_policy_withdrawn_total"] == 1
    assert told["saccade_monitor_seconds_total"] > 0
    key = (
        "saccade_monitor_answers_total",
        ("differs", "true"),
        ("model", "nac"),
        ("policy", "auto"),
    )
    assert pb.told[key] == lost


def test_strict_is_refused_with_the_reason(make, eventually):
    router = make()
    assert variant_of(send(router, 3, policy="auto", strict=True)) == {SMALL}
    comes(eventually, router, (1, 0))
    lose(router, eventually)
    code, text = send(router, 3, policy="auto", strict=True).error()
    assert code == "invalid" and text.startswith("policy 'auto' was withdrawn: ")
    assert text.endswith("Without strict, the full model answers")


def test_a_risk_falls_to_the_next_policy_and_to_the_full_model(make, eventually):
    router = make([policy(), policy("safe", risk=0.005, seconds=0.5)])
    assert router.answering.choice('{"max_risk": 0.02}').followed.policy.name == "auto"
    lose(router, eventually)
    assert router.answering.choice('{"max_risk": 0.02}').followed.policy.name == "safe"
    assert variant_of(send(router, 3, max_risk=0.02, strict=True)) == {SMALL}
    comes(eventually, router, (1, 0), "safe")
    lose(router, eventually, "safe")
    request = send(router, 3, max_risk=0.02, strict=True)
    assert variant_of(request) == {FULL} and request.answer()["certified"].all()


def test_load_does_not_choose_a_withdrawn_policy(make, eventually):
    shares = {"auto": [0.5, 0.5]}
    router = make(adaptive={"slo_ms": 1000.0, "floor_budget": None, "shares": shares})
    wish = src.choose.Wish(1.0, None, None)
    names = lambda: [one.name for one in src.choose.candidates_of(router.routes, wish)]  # noqa: E731
    assert names() == [FULL, "auto", SMALL]
    execute(router, [Request(3, max_latency_ms=900)])
    eventually(lambda: len(router.adaptive._objectives) == 1, 3)
    router._withdraw("auto", "it was withdrawn")
    assert names() == [FULL, SMALL] and not router.adaptive._objectives


def test_a_withdrawal_outlives_the_process(make, eventually, pb):
    first = make()
    lose(first, eventually)
    second = make()
    assert variant_of(send(second, 3)) == {FULL} and "auto" in second.routes.withdrawn
    assert make([policy(bound=0.007)]).routes.withdrawn == {}, "another certificate"


def test_evidence_outlives_the_process(make, eventually):
    first = make()
    send(first, LOST).answer()
    eventually(lambda: samples(first) == (1, 1), 3)
    assert samples(make()) == (1, 1)


def test_each_of_several_processes_judges_its_own_answers(make, eventually):
    first, second = make(process=(2, "nac_0_0")), make(process=(2, "nac_0_1"))
    send(first, LOST).answer()
    eventually(lambda: samples(first) == (1, 1), 3)
    assert samples(second) == (0, 0) and samples(make(process=(2, "nac_0_1"))) == (0, 0)
    assert samples(make(process=(2, "nac_0_0"))) == (1, 1), "its evidence outlives it"
    # Together they may withdraw a good policy as rarely as one.
    assert first.monitor._evidence["auto"].alpha == limit()["alpha"] / 2


def test_a_broken_file_is_no_reason_not_to_start(make, tmp_path, pb):
    (tmp_path / "run" / "monitor.json").write_text("{")
    assert samples(make()) == (0, 0) and "what the monitor knew is lost" in pb.log[0]


def test_it_waits_until_every_lane_is_idle(make, eventually):
    """A request in the full model's lane: the sample waits, and counts afterwards."""
    router = make()
    router.go.clear()
    busy = send(router, 7, budget=1.0)
    eventually(lambda: router.calls == [(FULL, 1)], 3)
    send(router, LOST).answer()
    time.sleep(0.2)
    assert router.calls == [(FULL, 1), (SMALL, 1)] and samples(router) == (0, 0)
    router.go.set()
    busy.answer()
    eventually(lambda: samples(router) == (1, 1), 3)


def test_it_uses_a_hundredth_of_the_time(make, eventually):
    router = make(pause=99.0)
    router.slow_s = 0.05
    for _ in range(3):
        send(router, LOST).answer()
    eventually(lambda: samples(router) == (1, 1), 3)
    time.sleep(0.3)
    assert samples(router) == (1, 1) and router.calls.count((FULL, 1)) == 1
    assert router.monitor._next_s - time.monotonic() > 99 * 0.05 - 1


def test_few_samples_wait_at_a_time(make, eventually):
    router = make(pause=1e9)
    send(router, LOST).answer()
    eventually(lambda: samples(router) == (1, 1), 3)
    most = src.monitor.MOST_WAITING
    for _ in range(3 * most):
        send(router, LOST).answer()
    time.sleep(0.1)
    assert router.monitor._jobs.qsize() <= most + 1  # drawn before the one before was put


def test_a_failure_of_the_full_model_does_not_count_against_the_policy(make, eventually):
    """Of requests whose chain ends early, only those that were sure are answered as certified."""
    router = make()
    router.broken = True
    assert not send(router, UNSURE).answer()["certified"].any()
    eventually(lambda: samples(router) == (1, 0), 3)
    assert send(router, UNSURE, policy="auto", strict=True).error()[0] == "unavailable"
    eventually(lambda: samples(router) == (2, 0), 3)
    send(router, LOST).answer()
    time.sleep(0.1)
    assert samples(router) == (2, 0), "it was not compared"
    router.broken = False
    send(router, LOST).answer()
    eventually(lambda: samples(router) == (3, 1), 3)


def test_images_are_kept_as_they_came(make, eventually, tmp_path):
    folder = tmp_path / "kept" / "here"
    router = make(keep=str(folder))
    for shade in (3, LOST, UNSURE, 3):
        send(router, shade).answer()
    send(router, 9, max_risk=0).answer()
    names = lambda: {path.read_bytes() for path in folder.glob("[0-9a-f]*")}  # noqa: E731
    eventually(lambda: names() == {picture(shade) for shade in (3, LOST, UNSURE, 9)}, 3)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.suffix == ".png" for path in folder.iterdir())


def test_embeddings_are_neither_compared_nor_kept(make, tmp_path):
    router = make(keep=str(tmp_path / "kept"))
    embeds = replace(router.routes.policies[0], embeds=True)
    request = SimpleNamespace(rows=1)  # cannot be copied, as a sampled one is
    assert router.monitor.sampled(request, embeds) is request


def test_a_folder_that_cannot_be_made_stops_nothing(make, eventually, tmp_path, pb):
    (tmp_path / "file").write_text("")
    router = make(keep=str(tmp_path / "file" / "kept"))
    send(router, LOST).answer()
    eventually(lambda: samples(router) == (1, 1), 3)
    assert "a sampled image was not kept" in pb.log[0]


def test_the_newest_images_stay(pb, tmp_path):
    (tmp_path / "mine.png").write_bytes(b"x" * 10_000)
    kept = src.kept_samples.KeptSamples(tmp_path, most_images=3, most_bytes=10_000)
    images = [picture(shade) for shade in range(5)]
    for image in images:
        kept.keep(image)
        kept.keep(image)
    there = lambda: [path.read_bytes() for path in tmp_path.glob("?" * 64 + ".png")]  # noqa: E731
    assert sorted(there()) == sorted(images[2:])
    kept = src.kept_samples.KeptSamples(tmp_path, most_images=3, most_bytes=2 * len(images[0]))
    kept.keep(b"RIFF0000WEBP")
    assert len(there()) == 1 and len(list(tmp_path.glob("*.webp"))) == 1
    assert (tmp_path / "mine.png").exists(), "a file of somebody else"


def test_routes_read_the_monitor(make):
    rules = make(limits={"auto": limit(rate=0.03, min_ari=0.9)}).routes.monitor
    assert rules.limits["auto"] == src.routes.MonitorLimit(0.03, 0.05, 0.9)
    assert json.loads(json.dumps(rules.share)) == 1.0
