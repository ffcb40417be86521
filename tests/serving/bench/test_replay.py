# SPDX-License-Identifier: Apache-2.0
"""Replayed arrivals: what a log says, when requests are sent, and what is said of the answers."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from saccade.core.errors import SaccadeError
from saccade.models.scores.results import wilson
from saccade.serving.bench.replay import arrivals as arrivals_module
from saccade.serving.bench.replay import replay as replay_module
from saccade.serving.bench.replay.arrivals import Arrivals, Generated, Source, read_log
from saccade.serving.bench.replay.figures import blocks_of, mean, recovery_s, share
from saccade.serving.bench.replay.open_load import OK, REFUSED, Ended, OpenOrder, send
from saccade.serving.bench.replay.replay import judged, recovered

SLOW_S = 0.4
ANY = (Source(),)


def log(folder, text, name="log.csv"):
    path = folder / name
    path.write_text(text)
    return path


TIMES = {
    "seconds": "10\n10.5\n12\n",
    "milliseconds": "1767225600000\n1767225600500\n1767225602000\n",
    "nanoseconds": "1767225600000000000\n1767225600500000000\n1767225602000000000\n",
    "timestamps": "2026-01-01T00:00:00Z\n2026-01-01T01:00:00.5+01:00\n2026-01-01 00:00:02\n",
}


@pytest.mark.parametrize("text", TIMES.values(), ids=TIMES)
def test_times_are_seconds_after_the_first(tmp_path, text):
    found = read_log(log(tmp_path, f"time\n{text}"))
    np.testing.assert_allclose(found.at_s, [0, 0.5, 2], atol=1e-4)
    np.testing.assert_allclose(found.edges, [0, 2], atol=1e-4)
    assert found.sources == ANY


def test_a_line_says_size_budget_and_caller(tmp_path):
    lines = [
        {"time": 3, "size": "640x480", "budget": 0.5, "caller": "a"},
        {"time": 1, "size": None, "budget": "fast"},
        {"time": 2, "size": "640x480", "budget": 0.5, "caller": "a"},
    ]
    found = read_log(log(tmp_path, "\n".join(map(json.dumps, lines)), "log.jsonl"))
    assert found.sources == (Source((640, 480), "0.5", "a"), Source(None, "fast", ""))
    # A service writes a line when a request ends: they are sorted, and the user is told.
    assert found.at_s.tolist() == [0, 1, 2] and found.source.tolist() == [1, 0, 0]
    assert found.unsorted == 1


def test_the_first_seconds_of_a_log_are_read_and_no_more(tmp_path):
    path = log(tmp_path, "time\n5\n6\n7.5\nnothing\n")
    assert read_log(path, seconds=2).at_s.tolist() == [0, 1]
    with pytest.raises(SaccadeError, match="row 4"):
        read_log(path)


WRONG = {
    "empty": ("time\n", "found no arrival"),
    "no header": ("0.1\n0.2\n", "row 1: found '0.1', expected only time, size, budget, caller"),
    "other column": ("time,bugdet\n1,2\n", "row 1: found 'bugdet'"),
    "no time": ("budget\n1\n", "time is None"),
    "negative": ("time\n1\n-2\n", "row 2: time is '-2', expected seconds of at least 0"),
    "words": ("time\nnoon\n", "time is 'noon'"),
    "infinite": ("time\ninf\n", "time is 'inf'"),
    "size": ("time,size\n1,640\n", "size is '640', expected width and height"),
    "huge": ("time,size\n1,99999x99999\n", "at most 67,108,864 pixels, such as 640x480"),
    "sizes": ("time,size\n" + "".join(f"1,{n + 1}x1\n" for n in range(65)), "more than 64 sizes"),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_log_is_refused_with_its_row(tmp_path, text, said):
    with pytest.raises(SaccadeError) as refused:
        read_log(log(tmp_path, text))
    assert said in str(refused.value)


def test_other_files_and_endless_logs_are_refused(tmp_path, monkeypatch):
    for path in (tmp_path / "none.csv", log(tmp_path, "time\n1\n", "log.txt"), tmp_path):
        with pytest.raises(SaccadeError, match="found no such log"):
            read_log(path)
    monkeypatch.setattr(arrivals_module, "MOST", 2)
    with pytest.raises(SaccadeError, match="more than 2 rows"):
        read_log(log(tmp_path, "time\n1\n2\n3\n"))


@pytest.mark.parametrize(
    ("text", "square"), [("poisson:50", 1), ("gamma:50,4", 4), ("gamma:50,8", 8)]
)
def test_generated_gaps_have_their_rate_and_variation(text, square):
    made = Generated.read(text)
    found = made.arrivals(made.rate, 2000, seed=1)
    gaps = np.diff(found.at_s)
    assert len(found.at_s) / 2000 == pytest.approx(50, rel=0.05)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(square, rel=0.1)
    again = made.arrivals(made.rate, 2000, seed=1)
    assert np.array_equal(found.at_s, again.at_s) and found.at_s[-1] <= 2000


def test_a_step_is_in_the_middle_third():
    found = Generated.read("step:50,8").arrivals(50, 300, seed=0)
    counts = [((found.at_s >= a) & (found.at_s < b)).sum() for a, b in pairwise(found.edges)]
    assert np.array(counts) / 100 == pytest.approx([50, 400, 50], rel=0.1)


@pytest.mark.parametrize(
    "text", ["poisson", "poisson:0", "poisson:5,2", "gamma:5", "step:5,0", "gamma:1e9e", "often:3"]
)
def test_other_arrivals_are_refused(text):
    with pytest.raises(SaccadeError, match=r"expected poisson:RATE, gamma:RATE,CV2 or step:RATE"):
        Generated.read(text)


def test_rates_of_the_capacity_and_too_many():
    assert Generated.read("gamma:0.7x,4") == ("gamma", 0.7, True, 4.0)
    with pytest.raises(SaccadeError, match=r"found 10,000,000 requests, expected at most"):
        Generated.read("poisson:1e5").arrivals(1e5, 100, 0)
    with pytest.raises(SaccadeError, match="no request in this time"):
        Generated.read("poisson:1").arrivals(1e-9, 1, 0)


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers with the caller, one at a time, `slow` late; model `busy` refuses, `broken` fails."""

    def __init__(self) -> None:
        self.seen: list[service_pb2.ModelInferRequest] = []

    def ModelInfer(self, request, context):  # noqa: N802
        self.seen.append(request)
        if request.model_name == "busy":
            context.abort(grpc.StatusCode.UNAVAILABLE, "variant 'a' is busy: it could not")
        if request.model_name == "broken":
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if request.id == "slow/1":
            time.sleep(SLOW_S)
        answer = service_pb2.ModelInferResponse()
        caller = request.id.partition("/")[0].encode()
        for name, content in (("variant", caller + b"\0\0"), ("degraded", b"\1")):
            answer.outputs.add(name=name, shape=[1, 1])
            answer.raw_output_contents.append(content)
        return answer


@pytest.fixture
def fake() -> Iterator[tuple[FakeServer, str]]:
    servicer = FakeServer()
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield servicer, f"127.0.0.1:{port}"
        server.stop(0).wait()


def order(url, at_s, heads=("any",), model="model", body=0):
    made = []
    for name in heads:
        message = service_pb2.ModelInferRequest(model_name=model, id=f"{name}/1")
        made.append(message.SerializeToString())
    image = service_pb2.ModelInferRequest(raw_input_contents=[b"image"]).SerializeToString()
    plan = np.stack([at_s, np.arange(len(at_s)) % len(heads), np.full(len(at_s), body)], 1)
    return OpenOrder(url, plan.tobytes(), tuple(made), (b"", image), 10.0)


def test_time_counts_from_when_a_request_was_due(fake):
    """All wait behind the first; a sender that waited for it would have found fast answers."""
    at_s = np.linspace(0, 0.2, 8)
    heads = ("slow", *[f"caller {n}" for n in range(7)])
    ended = send(order(fake[1], at_s, heads, body=1))
    assert (ended.end == OK).all()
    assert (ended.ms >= 1e3 * (SLOW_S - at_s) - 1).all()
    assert (ended.lag_ms < 1e3 * SLOW_S / 2).all()
    assert ended.variant.tolist() == [*heads] and ended.degraded.all()
    # A head and a body that follow each other are one request.
    assert [one.id for one in fake[0].seen[:1]] == ["slow/1"]
    assert all(one.raw_input_contents[0] == b"image" for one in fake[0].seen)


def test_what_held_up_the_sender_counts_too(fake):
    """It was late before it could send the first one, as on a machine without a free core."""
    ended = send(order(fake[1], np.full(3, -5.0)))
    assert (ended.ms >= 3000).all() and (ended.lag_ms >= 3000).all()


def test_several_processes_send_their_parts(fake):
    heads = [f"caller {n}" for n in range(7)]
    ended = send(order(fake[1], np.linspace(0, 0.1, 7), heads), processes=3)
    assert sorted(one.id for one in fake[0].seen) == [f"{name}/1" for name in heads]
    assert ended.variant.tolist() == heads and (ended.end == OK).all() and ended.cpu_s > 0


def test_refusals_are_told_from_failures(fake):
    for model, end in (("busy", REFUSED), ("broken", "UNAVAILABLE")):
        ended = send(order(fake[1], np.zeros(2), model=model))
        assert {*ended.end} == {end} and {*ended.variant} == {""}
        assert [*ended.first_errors] == [end]


def ended_of(ms, end=OK, variant="a", degraded=False, count=None):
    def column(value):
        return np.array([value] * count) if np.isscalar(value) and count else np.asarray(value)

    count = count or len(ms)
    arrays = map(column, (ms, [0.0] * count, end, variant, degraded))
    return Ended({}, 0.0, *arrays)


def test_what_is_late_refused_and_failed():
    ended = ended_of(
        [50.0, 150.0, 1.0, 1.0, 99.0],
        end=[OK, OK, REFUSED, "INTERNAL", OK],
        variant=["a", "a", "", "", "b"],
    )
    plan = Arrivals(np.arange(5.0), np.zeros(5, int), ANY, np.array([0.0, 4.0]))
    (one,) = judged(plan, ended, 100.0, {"a": 0.9, "b": 0.5})
    assert (one["sent"], one["late"], one["refused"], one["failed"]) == (5, 1, 1, 1)
    assert one["in_time"] == pytest.approx(0.4) and one["in_time_interval"] is None
    assert one["score"] == pytest.approx(0.7), "of answers in time"
    assert one["by_score"] == pytest.approx((0.9 + 0.5) / 5), "of all requests"
    assert one["variants"] == {"a": pytest.approx(2 / 3), "b": pytest.approx(1 / 3)}
    assert one["answered_ms"]["p50"] == 99.0 and one["refused_ms"]["p50"] == 1.0
    (without,) = judged(plan, ended, 100.0, {})
    assert "score" not in without


def test_recovery_is_measured_after_a_step_alone():
    at_s = np.arange(0, 30, 0.01)
    ms = np.where((at_s > 12) & (at_s < 20.4), 500.0, 10.0)
    ended = ended_of(ms, degraded=(at_s > 12) & (at_s < 23), count=len(at_s))
    step = Arrivals(at_s, np.zeros(len(at_s), int), ANY, np.array([0.0, 10, 20, 30]))
    found = recovered(step, ended, 100.0)
    assert found["99 % in time"] == pytest.approx(0.4, abs=0.051)
    assert found["half as without load"] == pytest.approx(2.5, abs=0.051)
    assert recovered(step._replace(edges=np.array([0.0, 30])), ended, 100.0) == {}
    assert recovery_s(at_s, ms > 1e6, 20.0, 0.99) is None


def test_intervals_count_blocks_of_time_and_not_requests():
    """A queue: its requests are late together, so counting them would be wrong 3 times of 4."""
    made, hits = Generated.read("gamma:60,4"), {"blocks": 0, "requests": 0}
    truth, trials = 0.892, 60
    for seed in range(trials):
        at_s, free, late = made.arrivals(60, 60, seed).at_s, 0.0, []
        for at in at_s.tolist():
            free = max(at, free) + 0.01
            late.append(free - at > 0.1)
        good = ~np.array(late)
        _, interval = share(good, blocks_of(at_s, 100.0))
        for name, (low, high) in (
            ("blocks", interval), ("requests", wilson(int(good.sum()), len(good))),
        ):  # fmt: skip
            hits[name] += low <= truth <= high
    assert hits["blocks"] / trials >= 0.8
    assert hits["requests"] / trials <= 0.5


def test_intervals_of_answers_that_all_end_alike_and_of_short_runs():
    at_s = np.arange(0, 100, 0.01)
    hits = np.ones(len(at_s), bool)
    found, (low, high) = share(hits, blocks_of(at_s, 100.0))
    assert found == high == 1 and 0.94 < low < 0.97, "of 99 blocks of a second"
    assert share(hits, blocks_of(at_s, 500.0))[1][0] < low, "a queue may last ten deadlines"
    assert blocks_of(at_s[:900], 100.0) is None and share(hits[:900], None) == (1.0, None)


def test_the_mean_of_some_values_varies_as_the_blocks_do():
    rng, at_s = np.random.default_rng(0), np.arange(0, 300, 0.1)
    level = rng.normal(size=30).repeat(100)  # of a block of ten seconds
    among = rng.random(len(at_s)) < 0.5
    found, (low, high) = mean(level, among, blocks_of(at_s, 100.0))
    assert found == pytest.approx(level[among].mean())
    expected = 2 * 2.045 * level[::100].std(ddof=1) / 30**0.5
    assert high - low == pytest.approx(expected, rel=0.1)


def test_the_command_replays_a_log_on_a_server(saccade, server, tmp_path):
    lines = "time,size,budget,caller\n0.2,,,\n0,64x48,0.5,a\n0.1,,1,b\n"
    words = ("replay", "--model", server.model, "--url", server.url, "--deadline-ms", "5000")
    path = str(log(tmp_path, lines))
    code, out, _ = saccade(*words, path, "--speed", "2", "--json")
    found = json.loads(out)
    (phase,) = found["phases"]
    assert code == 0 and (phase["sent"], phase["in_time"], phase["failed"]) == (3, 1.0, 0)
    assert phase["end_s"] == pytest.approx(0.1) and found["unsorted"] == 1
    shares = sorted(phase["variants"].values())
    assert shares == pytest.approx([1 / 3, 2 / 3]), "of budget 0.5, and of 1 and none"
    code, out, err = saccade(*words, "--arrivals", "step:20,2", "--seconds", "1.5")
    assert code == 0 and "in time %" in out and "after the step: 99 % in time" in out, err
    assert "no intervals: with this deadline, they need 500 s in each row" in out


REFUSED_COMMANDS = {
    "nothing": ((), "neither a log nor --arrivals"),
    "both": (("LOG", "--arrivals", "poisson:1"), "a log and --arrivals"),
    "speed": (("--arrivals", "poisson:1", "--speed", "2"), "--speed with --arrivals"),
    "no objective": (("LOG",), "has no objective"),
    "budget": (("LOG", "--deadline-ms", "100"), "no variant"),
    "scores": (("LOG", "--deadline-ms", "100", "--scores", "."), "has no frontier.json"),
}


@pytest.mark.parametrize(("given", "said"), REFUSED_COMMANDS.values(), ids=REFUSED_COMMANDS)
def test_the_command_refuses_what_cannot_be_replayed(saccade, server, tmp_path, given, said):
    path = str(log(tmp_path, "time,budget\n0,0.001\n"))
    words = [path if word == "LOG" else str(tmp_path) if word == "." else word for word in given]
    code, out, err = saccade("replay", "--model", server.model, "--url", server.url, *words)
    assert (code, out) == (2, "") and said in err


@pytest.mark.parametrize(("lag_ms", "seconds"), [(4.0, 20), (6.0, 20), (6.0, 0.1)])
def test_a_sender_that_fell_behind_is_marked(saccade, server, monkeypatch, lag_ms, seconds):
    def late(order, processes):
        count = len(order.plan) // 24
        found = ended_of(10.0, count=count)
        return found._replace(lag_ms=np.where(np.arange(count) < count / 50, lag_ms, 0.0))

    monkeypatch.setattr(replay_module, "send", late)
    words = ("--model", server.model, "--url", server.url, "--deadline-ms", "100")
    words = ("replay", *words, "--arrivals", "poisson:500", "--seconds", str(seconds))
    behind = lag_ms > 5 and seconds > 1  # one of fifty requests may be an accident
    assert json.loads(saccade(*words, "--json")[1])["behind"] == behind
    assert ("FELL BEHIND" in (text := saccade(*words)[1])) == behind
    assert ("no intervals" in text) == (seconds < 1)
