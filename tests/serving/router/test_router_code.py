# SPDX-License-Identifier: Apache-2.0
"""The router's own model without a server: one caller's value never reaches its mates."""

import io
import json
import threading
import time

import numpy as np
import pytest
from PIL import Image
from support.serving.routers import (
    PREPROCESSING,
    execute,
    model_of,
    router_arguments,
    src,
    variant_route,
)
from support.serving.routers import FakeRequest as Request
from support.serving.routers import shade_png as png

VARIANT = "nac-b1000-fp32"
STAGES = ("waiting", "decode", "model")


@pytest.fixture
def router(pb, tmp_path):
    """The router before one variant, whose runs are held until `go`; `runs` are their sizes."""
    made = model_of(tmp_path, [variant_route(VARIANT)], {"logits": 2})
    made.go, made.runs, made.timeouts = threading.Event(), [], []

    def answer(asked):
        image = asked["inputs"][0].as_numpy()
        made.runs.append(len(image))
        made.timeouts.append(asked["timeout"])
        assert made.go.wait(30)
        if (image == 255).any():
            raise pb.TritonError("the run failed")
        return {"logits": np.repeat(image.reshape(len(image), -1)[:, :1], 2, 1).astype(np.float32)}

    pb.answer = answer
    made.initialize(router_arguments())
    yield made
    made.go.set()
    made.finalize()


@pytest.fixture
def busy(router, monkeypatch):
    """The same, while a first request is run. The pool decodes images of any size."""
    monkeypatch.setattr("lane.SMALL_MEGAPIXELS", 0.0)
    router.first = Request()
    execute(router, [router.first])
    while not router.runs:
        time.sleep(0.001)
    return router


def ends(router, pb):
    """How many requests ended in which way, once the router has ended."""
    router.go.set()
    router.finalize()
    counted = {}
    for (name, *labels), number in pb.told.items():
        if name.endswith("_total"):
            of = dict(labels)
            rest = [of[label] for label in ("variant", "reason", "outcome") if label in of]
            counted[name.removeprefix("saccade_").removesuffix("_total"), *rest] = number
    return counted


def test_each_request_is_counted_once_by_how_it_ended(busy, pb):
    late = Request(timeout=50_000)
    mates = [
        *(Request(colour="red"), Request(b"junk"), Request(png(), b"junk")),
        *(
            Request(png(255)),
            Request(png(7)),
            Request(timeout=2**64 - 1),
            late,
        ),
        Request(saccade_probe="lanes"),
    ]
    execute(busy, mates)
    late.answered()
    busy.go.set()
    for request in (busy.first, *mates):
        request.answered()
    assert ends(busy, pb) == {
        ("requests", "answered"): 2, ("answers", VARIANT): 2,
        ("requests", "failed"): 1, ("failures", VARIANT): 1,
        ("requests", "refused"): 5, ("refusals", "", "invalid_request"): 1,
        ("refusals", VARIANT, "invalid_request"): 1, ("refusals", VARIANT, "timeout"): 1,
        ("refusals", VARIANT, "invalid_image"): 2,
    }  # fmt: skip
    of_variant = ("model", "nac"), ("variant", VARIANT)
    counts = [pb.told[f"saccade_{time}_seconds_count", *of_variant] for time in STAGES]
    # One that ran out of time waited, too; a group whose run failed is run one by one.
    # The one that ran out of time may have been decoded before that.
    assert counts in ([6, 3, 2], [6, 4, 2])


def test_a_negative_timeout_is_its_callers_own_failure(busy, eventually):
    bad, good = (
        Request(timeout=2**64 - 1),
        [Request(png(7), timeout=t) for t in (0, 2**62)],
    )
    execute(busy, [bad, *good])
    assert bad.error() == (
        "invalid",
        "the request's timeout is -1 microseconds, expected 1 or more, or 0 for none",
    )
    decoded(busy, eventually)
    busy.go.set()
    for request in good:
        assert request.error() is None
        np.testing.assert_array_equal(request.answer()["logits"], [[7, 7]])
    assert busy.runs == [1, 2] and all(timeout < 2**63 for timeout in busy.timeouts)


def test_a_run_that_fails_is_made_again_for_each_request(busy, eventually):
    bad, good = Request(png(255)), Request(png(7))
    execute(busy, [bad, good])
    decoded(busy, eventually)
    busy.go.set()
    assert bad.error() == ("internal", f"variant '{VARIANT}' failed; see the server's log")
    np.testing.assert_array_equal(good.answer()["logits"], [[7, 7]])
    assert busy.runs == [1, 2, 1, 1]


def decoded(router, eventually):
    """Wait until the images of all waiting requests are pixels."""
    (lane,) = router.lanes.values()
    eventually(lambda: lane._backlog.cost[1] < 1e-6 and not lane._ahead, 5)


@pytest.fixture
def decodes(monkeypatch):
    """The files that were decoded, in their order; a decode waits for `go`."""
    plain, files = src.decoding.decode, Files()

    def slow(data, wanted):
        files.append(data)
        assert files.go.wait(30)
        return plain(data, wanted)

    monkeypatch.setattr(src.decoding, "decode", slow)
    return files


class Files(list):
    """Files, and the event for which their decoding waits."""

    def __init__(self):
        self.go = threading.Event()
        self.go.set()


def test_the_next_group_is_decoded_while_the_lane_is_busy(busy, decodes, eventually):
    requests = [Request(png(shade)) for shade in range(20)]
    execute(busy, requests)
    eventually(lambda: len(decodes) >= 8, 1)
    waiting = next(iter(busy.lanes.values()))._backlog
    eventually(lambda: waiting.cost[1] < 0.02 * 12.1, 1)
    assert busy.runs == [1], "what is decoded already costs no decoding time"
    busy.go.set()
    for shade, request in enumerate(requests):
        np.testing.assert_array_equal(request.answer()["logits"], [[shade, shade]])
    assert busy.runs[:3] == [1, 8, 8] and sum(busy.runs) == 21
    assert sorted(decodes) == sorted(png(n) for n in range(20))


def test_a_single_small_image_is_left_to_the_lane(busy, monkeypatch, decodes, eventually):
    monkeypatch.setattr("lane.SMALL_MEGAPIXELS", 0.04)
    small, several = Request(png(1)), Request(png(2), png(3))
    execute(busy, [small, several])
    eventually(lambda: len(decodes) == 2, 1)
    assert sorted(decodes) == [png(2), png(3)]
    busy.go.set()
    assert small.error() is None and several.error() is None and busy.runs == [1, 3]


def test_more_requests_join_what_was_decoded_ahead(busy, decodes, eventually):
    first, later = Request(png(1)), Request(png(2))
    execute(busy, [first])
    eventually(lambda: len(decodes) == 1, 1)
    execute(busy, [later])
    eventually(lambda: len(decodes) == 2, 1)
    decoded(busy, eventually)
    busy.go.set()
    assert first.error() is None and later.error() is None and busy.runs == [1, 2]


def test_a_broken_image_is_refused_while_the_lane_is_busy(busy):
    bad, good = Request(b"junk"), Request(png(7))
    execute(busy, [bad, good])
    assert bad.error()[0] == "invalid" and busy.first.response is None
    busy.go.set()
    np.testing.assert_array_equal(good.answer()["logits"], [[7, 7]])
    assert busy.runs == [1, 1]


def test_a_group_waits_for_an_image_that_is_decoded_ahead(busy, decodes, eventually):
    decodes.go.clear()
    request = Request(png(7))
    execute(busy, [request])
    eventually(lambda: len(decodes) == 1, 1)
    busy.go.set()
    assert busy.first.error() is None
    (lane,) = busy.lanes.values()
    assert lane._backlog.requests == 1, "although its turn has come"
    decodes.go.set()
    np.testing.assert_array_equal(request.answer()["logits"], [[7, 7]])
    assert len(decodes) == 1, "an image is decoded once"


def test_whoever_leaves_while_decoded_ahead_hears_one_answer(busy, decodes, eventually):
    (lane,) = busy.lanes.values()
    for file in (png(7), b"junk"):
        decodes.go.clear()
        late = Request(file, timeout=50_000)
        execute(busy, [late])
        eventually(lambda: len(decodes) == 1, 1)
        assert late.error()[0] == "unavailable" and "ran out" in late.error()[1]
        decodes.go.set()
        eventually(lambda: not lane._ahead, 1)
        decodes.clear()
    assert busy.runs == [1]


def test_a_refusal_of_execute_is_returned_and_not_sent(router):
    """A response that is sent costs the server's queue two more messages."""
    legal, refused = Request(), Request(budget=7)
    answers = router.execute([legal, refused])
    assert answers[0] is None and answers[1].error.code() == "invalid"
    assert refused.response is None
    router.go.set()
    assert legal.error() is None


def test_a_request_that_loses_its_place_to_a_later_one_is_told(busy):
    """Its own `execute` has returned, so its refusal is sent."""
    crowd = [Request(identity=f"crowd/{index}") for index in range(256)]
    execute(busy, crowd)
    execute(busy, [Request(identity="other/1")])
    (removed,) = [one for one in crowd if one.response is not None]
    assert removed.error()[0] == "unavailable" and "is full" in removed.error()[1]


def test_each_of_several_processes_has_its_share(pb, tmp_path, monkeypatch):
    """Of the instances of a variant, of the cores that decode, and of the memory for that."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    made = model_of(tmp_path, [variant_route(VARIANT, instances=32)], {"logits": 2})
    made.initialize(router_arguments(4, "nac_0_3"))
    try:
        (lane,) = made.lanes.values()
        assert (lane.in_flight, made.pool.threads, made.pool._most_megapixels) == (9, 4, 64.0)
        probe = Request(saccade_probe="lanes")
        execute(made, [probe])
        (content,) = json.loads(probe.answer()["saccade_lanes"].tobytes())
        assert content["router"] == "nac_0_3"
    finally:
        made.finalize()


def test_a_probe_is_answered_while_the_lane_is_busy(busy):
    execute(busy, [Request() for _ in range(300)])
    probe = Request(saccade_probe="lanes")
    execute(busy, [probe])
    assert probe.error() is None
    (content,) = json.loads(probe.answer()["saccade_lanes"].tobytes())
    assert (content["variant"], content["part"], content["waiting"]) == (VARIANT, "", 256)
    assert 0 <= content["step_s"] <= content["running_s"] < content["longest_step_s"]
    assert busy.runs == [1], "a probe is no work"


def test_many_megapixels_together_are_refused_before_any_is_decoded(router, monkeypatch):
    # What a test can afford, in place of 1,000.
    monkeypatch.setattr(src.decoding, "most_megapixels", lambda wanted: 3)
    refused, legal = (
        Request(*[png(side=1000)] * 4),
        Request(*[png(side=1000)] * 3),
    )
    router.go.set()
    execute(router, [legal])
    assert legal.error() is None and router.runs == [3]
    monkeypatch.setattr(src.decoding, "decode", None)
    execute(router, [refused])
    code, text = refused.error()
    assert code == "invalid"
    assert "4 images have 4.0 megapixels together, allowed are 3 megapixels per request" in text


def test_sixty_four_photographs_are_legal_and_as_many_posters_are_not(pb):
    wanted = src.image_decoding.ImageInput.from_dict(PREPROCESSING)
    for count, each in ((64, 12.2), (20, 50.0)):
        src.decoding.check_megapixels([each] * count, wanted)
    with pytest.raises(src.decoding.Refused, match="64 images have 3200"):
        src.decoding.check_megapixels([50.0] * 64, wanted)


def test_the_cap_goes_by_what_is_decoded_and_not_by_the_first_header(router, monkeypatch):
    small, large = png(side=4), png(side=1000)
    # A second header, which Pillow obeys.
    forged = small[:33] + large[8:]
    assert (
        src.decoding.megapixels(forged) == 16e-6 and src.decoding.opened_megapixels(forged) == 1.0
    )
    assert src.decoding.opened_megapixels(b"no image") == 0
    plain, done = src.decoding.decode, []
    monkeypatch.setattr(src.decoding, "decode", lambda *given: done.append(1) or plain(*given))
    monkeypatch.setattr(src.decoding, "most_megapixels", lambda wanted: 3)
    monkeypatch.setattr(src.decoding, "SLOW_S", 1e-9)  # on any machine
    router.go.set()
    request = Request(*[forged] * 8)
    execute(router, [request])
    assert "4.0 megapixels together, allowed are 3 " in request.error()[1]
    assert len(done) == 4, "no more is decoded than is allowed, and one image"


def test_a_header_that_lies_does_not_make_other_images_look_dear(router, monkeypatch):
    forged = png(side=4)[:33] + png(side=1000)[8:]
    monkeypatch.setattr(src.decoding, "decode", lambda *_: time.sleep(0.1) or np.zeros((8, 8, 1)))
    router.go.set()
    request = Request(forged)
    execute(router, [request])
    assert request.error() is None
    (lane,) = router.lanes.values()
    assert 0.09 < lane.pace.decode.of(1) < 1, "a tenth of a second or so for its megapixel"


def test_time_is_looked_at_between_images(router, monkeypatch, eventually):
    plain, done = src.decoding.decode, []

    def slow(*given):
        done.append(time.sleep(0.1))
        return plain(*given)

    monkeypatch.setattr(src.decoding, "decode", slow)
    request = Request(*[png()] * 64, timeout=250_000)
    execute(router, [request])
    code, text = request.error()
    assert code == "unavailable" and "timeout ran out" in text
    eventually(lambda: not router.lanes[VARIANT, ""]._ahead, 5)
    assert len(done) < 64 and not router.runs


def test_a_large_request_is_run_in_parts_until_its_time_is_over(router, eventually):
    router.go.set()
    router.lanes[VARIANT, ""].pace.run.add(1, 1.0)
    whole = Request(*[png(shade) for shade in range(20)])
    execute(router, [whole])
    np.testing.assert_array_equal(whole.answer()["logits"][:, 0], range(20))
    assert router.runs == [7, 6, 7], "of nearly equal size"
    router.lanes[VARIANT, ""].pace.run.add(1, 100.0)
    router.go.clear()
    late = Request(*[png()] * 20, timeout=300_000)
    execute(router, [late])
    eventually(lambda: len(router.runs) == 4, 1)
    time.sleep(0.35)
    router.go.set()
    code, text = late.error()
    assert code == "unavailable" and "ran out when 7 of 20 rows were run" in text
    assert len(router.runs) == 4


def test_what_comes_too_late_is_not_counted_as_answered(router, pb, eventually):
    late = Request(timeout=200_000)
    execute(router, [late])
    eventually(lambda: router.runs, 1)
    time.sleep(0.25)
    router.go.set()
    assert late.error() is None, "the caller may still be there"
    counted = ends(router, pb)
    assert counted["refusals", VARIANT, "timeout"] == 1
    assert not counted.get(("requests", "answered"))


def test_nothing_is_run_for_a_caller_that_has_gone(busy, pb):
    gone, there = Request(), Request()
    gone.gone = True
    execute(busy, [gone, there])
    time.sleep(0.06)  # before that it is not worth asking
    busy.go.set()
    assert gone.error() == ("cancelled", "the caller has gone")
    assert there.error() is None and busy.runs == [1, 1]
    assert ends(busy, pb)["refusals", VARIANT, "caller_gone"] == 1


def test_whoever_runs_out_of_time_hears_so_at_once(busy):
    waiting = Request(timeout=50_000)
    execute(busy, [waiting])
    code, text = waiting.error()  # while the lane is still busy
    assert code == "unavailable" and "timeout ran out" in text
    assert busy.runs == [1]


@pytest.mark.parametrize("mode", ["PNG", "JPEG", "WEBP", "WEBP lossless"])
def test_the_size_in_a_header_is_what_pillow_reads(pb, mode):
    for size in ((31, 17), (640, 1280)):
        file = io.BytesIO()
        Image.new("RGB", size).save(file, mode.split()[0], lossless="lossless" in mode)
        assert src.decoding.megapixels(file.getvalue()) == size[0] * size[1] / 1e6
        for end in (*range(40), 200):
            assert src.decoding.megapixels(file.getvalue()[:end]) <= size[0] * size[1] / 1e6


@pytest.mark.parametrize("data", [b"", b"\xff\xd8" + b"\xff" * 10**6, b"RIFF....WEBPVP8 "])
def test_a_header_that_is_none_costs_nothing(pb, data):
    assert src.decoding.megapixels(data) == 0
    bomb = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + 2 * (2**31 - 1).to_bytes(4, "big")
    assert src.decoding.megapixels(bomb) > 1e12
    wanted = src.image_decoding.ImageInput.from_dict(PREPROCESSING)
    assert (
        src.decoding.expected_megapixels([bomb, data], wanted) == 2 * src.decoding.IMAGE_MEGAPIXELS
    )


def test_a_dead_process_is_not_asked_again_for_each_request(busy, pb, eventually):
    def died(asked):
        busy.runs.append(len(asked["inputs"][0].as_numpy()))
        raise pb.TritonError("in ensemble, Stub process 'nac' is not healthy.")

    mates = [Request(), Request()]
    execute(busy, mates)
    decoded(busy, eventually)
    pb.answer = died
    busy.go.set()
    for mate in mates:
        code, text = mate.error()
        assert code == "unavailable" and "has died or is being loaded" in text
    assert busy.runs == [1, 2]
    assert ends(busy, pb)["refusals", VARIANT, "unavailable"] == 2


def test_what_will_be_refused_costs_nothing(pb):
    def header(megapixels):
        sides = int(1000 * megapixels), 1000
        return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"".join(n.to_bytes(4, "big") for n in sides)

    wanted = src.image_decoding.ImageInput.from_dict(
        PREPROCESSING
    )  # images of at most 50 megapixels
    expected = src.decoding.expected_megapixels([header(49), header(1), header(51)], wanted)
    assert expected == pytest.approx(50 + 3 * src.decoding.IMAGE_MEGAPIXELS)
    assert src.decoding.expected_megapixels([header(50)] * 21, wanted) == pytest.approx(
        21 * src.decoding.IMAGE_MEGAPIXELS
    )


def test_others_are_answered_between_the_parts_of_a_large_request(router, pb, eventually):
    lane, run, ended = router.lanes[VARIANT, ""], pb.answer, []
    pb.answer = lambda asked: (ended.append(lane.report()["groups"]), run(asked))[1]
    lane.pace.run.add(1, 0.1)
    large = Request(*[png(shade) for shade in range(20)], identity="large/1")
    execute(router, [large])
    eventually(lambda: router.runs, 1)
    own, other = Request(png(3), identity="large/2"), Request(png(4), identity="small/1")
    execute(router, [own, other])
    router.go.set()
    np.testing.assert_array_equal(large.answer()["logits"][:, 0], range(20))
    assert own.answer()["logits"][0, 0] == 3 and other.answer()["logits"][0, 0] == 4
    assert router.runs == [7, 1, 6, 7, 1] and ended[:4] == [0, 0, 0, 0]
    eventually(lambda: lane.idle, 1)
    assert lane.report()["begun"] == lane.report()["groups"] == 3


def test_others_do_not_make_a_large_request_late(router, eventually):
    lane = router.lanes[VARIANT, ""]
    lane.pace.run.add(1, 0.1)
    large = Request(*[png()] * 20, identity="large/1", timeout=60_000_000)
    execute(router, [large])
    eventually(lambda: router.runs, 1)
    other = Request(png(4), identity="small/1")
    execute(router, [other])
    lane.pace.run = src.pace.Mean()
    lane.pace.run.add(1, 3.0)  # 13 images are left in 60 s, and a whole group of others takes 24
    router.go.set()
    assert large.error() is None and other.error() is None and router.runs == [7, 6, 1, 7]
