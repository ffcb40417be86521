# SPDX-License-Identifier: Apache-2.0
"""Busy is not dead: what the supervisor makes of probes, by stand-ins for server and clock."""

import math
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from saccade.core.errors import ServerFailed
from saccade.serving.client import readiness
from saccade.serving.client.connection import explain, is_queue_full
from saccade.serving.client.readiness import Board, Probe, Prober
from saccade.serving.client.wire import with_deadline
from saccade.serving.server import process as process_module
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.liveness import (
    LONGEST_CUT_S,
    LONGEST_RUN_S,
    MISSES,
    Liveness,
    VariantReload,
    process_time,
)
from saccade.serving.server.process import Stub
from saccade.serving.server.supervisor import Patience, Supervisor

TIMEOUT_S = 2.0
LANE = {
    "router": "m_0_0", "variant": "v", "part": "", "groups": 1, "running_s": 70.0, "step_s": 1.0,
    "longest_step_s": 60.0, "waiting": 0, "waiting_s": 0.0,
}  # fmt: skip


class Answers:
    """A prober whose answers the test gives."""

    timeout_s = TIMEOUT_S
    late_probe = Prober.late_probe

    def __init__(self):
        self.came, self.out, self.statistics = [], {}, False

    def ask(self, model):
        return model not in self.out

    def answers(self):
        probes, self.came = self.came, []
        return probes

    def late(self):
        return dict(self.out)

    def is_at_work(self, model):
        return self.statistics


@pytest.fixture
def prober():
    return Answers()


@pytest.fixture
def board():
    made = Board("m", ("v",))
    made.enter("serving")
    for name in ("m", "v"):
        made.mark(name, "")
    return made


@pytest.fixture
def stub():
    """A process that sleeps until it is told to compute."""
    yield from sleeping()


def sleeping():
    code = "import sys; sys.stdin.readline()\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    while process_time(process.pid)[0] != "S":
        time.sleep(0.01)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def server():
    """A process that computes for nobody's probe once it is told to."""
    yield from sleeping()


@pytest.fixture
def clock(monkeypatch):
    """The clock that liveness reads: `clock.now += 2` lets two seconds pass."""
    state = SimpleNamespace(now=1000.0)
    place = "saccade.serving.server.liveness.time"
    monkeypatch.setattr(place, SimpleNamespace(monotonic=lambda: state.now))
    return state


@pytest.fixture
def liveness(prober, board, stub, server, clock):
    process = SimpleNamespace(
        stubs_of=lambda model: [Stub(stub.pid, 0, "v")] if model == "v" else [], pid=server.pid
    )
    return Liveness(process, prober, board, 5.0)


def looks(liveness, clock, prober, times, model="v"):
    """Liveness while the model's probe stays out for so many deadlines."""
    verdict = None
    for turn in range(times):
        clock.now += 1.1 * TIMEOUT_S
        prober.out = {model: (turn + 1) * 1.1 * TIMEOUT_S}
        verdict = verdict or liveness.look()
    return verdict


def test_a_model_that_stands_still_is_dead_after_three_deadlines(liveness, clock, prober, board):
    assert looks(liveness, clock, prober, MISSES - 1) is None
    assert not board.readiness()
    assert "v does not answer: no answer within 2 s" in looks(liveness, clock, prober, 1)


def test_a_model_that_answers_others_is_busy(liveness, clock, prober, board):
    prober.statistics = True
    assert looks(liveness, clock, prober, 20) is None
    assert board.readiness() and "making progress" in board.readiness().busy["v"]


def test_a_model_that_computes_is_busy_but_not_for_ever(liveness, clock, prober, board, stub):
    liveness.look()
    stub.stdin.write(b"\n")
    stub.stdin.flush()
    begun = process_time(stub.pid)[1]

    def computed():
        """Let it use more than housekeeping would in the time that will seem to have passed."""
        nonlocal begun
        while process_time(stub.pid)[1] < begun + 6:
            time.sleep(0.01)
        begun = process_time(stub.pid)[1]

    for turn in range(MISSES + 1):
        computed()
        clock.now += 1.1 * TIMEOUT_S
        prober.out = {"v": (turn + 1) * 1.1 * TIMEOUT_S}
        assert liveness.look() is None
    assert board.readiness()
    prober.out = {"v": LONGEST_RUN_S + 1}
    verdicts = []
    for _ in range(MISSES):
        computed()
        clock.now += 1.1 * TIMEOUT_S
        verdicts.append(liveness.look())
    assert verdicts[-1] and verdicts[:-1] == [None] * (MISSES - 1)


def test_a_stopped_process_is_not_busy(liveness, clock, prober, stub):
    prober.statistics = True
    os.kill(stub.pid, signal.SIGSTOP)
    while process_time(stub.pid)[0] != "T":
        time.sleep(0.01)
    assert "v does not answer" in looks(liveness, clock, prober, MISSES)


def test_the_answers_of_other_processes_excuse_one_not_for_ever(
    liveness, clock, prober, monkeypatch
):
    prober.statistics = True  # another process of the model answers
    monkeypatch.setattr(liveness, "_used", lambda _: ("SS", 0))
    clock.now = LONGEST_RUN_S
    prober.out = {"m": LONGEST_RUN_S - 1}
    for _ in range(2 * MISSES):
        clock.now += 1.1 * TIMEOUT_S
        assert liveness.look() is None
    prober.out = {"m": LONGEST_RUN_S + 1}
    verdicts = []
    for _ in range(MISSES):
        clock.now += 1.1 * TIMEOUT_S
        verdicts.append(liveness.look())
    assert "m does not answer" in verdicts[-1] and verdicts[:-1] == [None] * (MISSES - 1)


def test_a_server_that_says_nothing_at_all_hangs(liveness, clock, prober):
    prober.statistics = None
    assert looks(liveness, clock, prober, MISSES)
    assert liveness.hangs


def test_a_server_at_work_that_has_no_time_to_answer_is_busy(
    liveness, clock, prober, board, server
):
    prober.statistics = None
    assert looks(liveness, clock, prober, 1) is None
    server.stdin.write(b"\n")
    server.stdin.flush()
    for _ in range(3 * MISSES):
        begun = process_time(server.pid)[1]
        while process_time(server.pid)[1] < begun + 10:
            time.sleep(0.01)
        assert looks(liveness, clock, prober, 1) is None
    assert board.readiness().variants["v"]
    server.send_signal(signal.SIGSTOP)
    assert looks(liveness, clock, prober, 2 * MISSES) is not None


def test_an_answer_ends_all_doubt(liveness, clock, prober, board):
    assert looks(liveness, clock, prober, MISSES - 1) is None
    prober.out, prober.came = {}, [Probe("v")]
    assert liveness.look() is None
    assert board.readiness()
    assert looks(liveness, clock, prober, MISSES - 1) is None


def test_what_waits_is_said_and_harms_nobody(liveness, prober, board):
    prober.came = [Probe("m", lanes=({**LANE, "waiting": 212, "waiting_s": 1.42},))]
    assert liveness.look() is None
    readiness = board.readiness()
    assert readiness and readiness.to_dict()["busy"] == {"v": "212 requests waiting, about 1.4 s"}
    old = {key: value for key, value in LANE.items() if key != "router"}  # of an old repository
    prober.came = [Probe("m", lanes=(old,))]
    liveness.look()
    assert board.readiness().busy == {"v": "212 requests waiting, about 1.4 s"}
    prober.came = [Probe("m", lanes=(LANE,))]
    liveness.look()
    assert board.readiness().busy == {}


def test_what_waits_in_each_process_of_the_router_is_added_up(liveness, prober, board):
    other = {**LANE, "router": "m_0_1", "waiting": 3, "waiting_s": 0.5}
    for lane in (other, {**LANE, "waiting": 4, "waiting_s": 2.0}, {**other, "waiting": 5}):
        prober.came = [Probe("m", lanes=(lane,))]
        assert liveness.look() is None
    assert board.readiness().busy == {"v": "9 requests waiting, about 2 s"}
    assert liveness.left_s == 2.0
    prober.came = [Probe("m", lanes=(LANE,)), Probe("m", lanes=({**other, "waiting": 0},))]
    liveness.look()
    assert board.readiness().busy == {}


def test_a_lane_that_stands_still_for_longer_than_any_step_is_dead(liveness, prober):
    prober.came = [Probe("m", lanes=({**LANE, "step_s": 59.0},))]
    assert liveness.look() is None
    prober.came = [Probe("m", lanes=({**LANE, "step_s": 61.0},))]
    assert "lane of v has made no progress for 61 s" in liveness.look()


def test_a_server_that_takes_no_connection_is_left_alone_for_a_minute(
    liveness, clock, prober, board
):
    # Whoever holds all its descriptors would otherwise end it, or one variant after the other.
    cut = [Probe(model, "connection refused", unreachable=True) for model in ("m", "v")]
    for _ in range(10):
        prober.came = list(cut)
        assert liveness.look() is None and liveness.silent() == ()
        clock.now += 5
    prober.came = [Probe("m")]
    assert liveness.look() is None and board.readiness()
    prober.came = list(cut)
    assert liveness.look() is None
    clock.now += LONGEST_CUT_S
    prober.came = list(cut)
    assert "no new connection" in liveness.look() and liveness.hangs


class OneDeath:
    """A server whose model `name` dies once; `new` is whether its new process has started."""

    def __init__(self, name):
        self.dead, self.new = [Stub(1, 1, name)], False

    def dead_stubs(self):
        dead, self.dead = self.dead, []
        return dead

    def stubs_of(self, _):
        return []

    def abandon(self, _):
        pass

    def load_again(self, _):
        pass

    def new_stubs(self, _):
        return self.new

    def cpu_s(self):
        return 0.0


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [("v", "variant_died", "the other models still answer"),
     ("m", "router_died", "The router of m has died")],
)  # fmt: skip
def test_a_death_is_reported_as_what_it_means(board, prober, caplog, name, kind, text):
    prober.forget = lambda _: None
    VariantReload(OneDeath(name), board, 60).step(prober)
    (record,) = caplog.records
    assert record.saccade_fields["event"] == kind and text in record.message
    assert ("no variant answers" in record.message) == (name == "m")


def test_only_a_probe_of_the_new_process_ends_a_reload(board, monkeypatch):
    calls = []
    client = SimpleNamespace(async_infer=lambda _, callback, **__: calls.append(callback))
    monkeypatch.setattr(readiness, "connect_alone", lambda _: client)
    monkeypatch.setattr(Prober, "_request", lambda *_: {})
    answer = SimpleNamespace(as_numpy=lambda _: None)
    prober, process = Prober("nowhere", 5), OneDeath("v")
    reload = VariantReload(process, board, 60)

    def step():
        for one in prober.answers():
            board.mark(one.model, one.reason)
        reload.step(prober)
        for one in prober.answers():
            board.mark(one.model, one.reason)
        return reload.note_answers()

    assert step() == []  # it is noted and loaded
    prober.ask("v")
    calls[-1](answer, None)
    assert step() == []
    prober.ask("v")  # this one is answered after the new process has started
    process.new = True
    assert step() == []
    calls[-2](answer, None)
    assert step() == [] and "v" not in board.answering()
    calls[-1](answer, None)
    assert step() == ["v"]


def test_patience_ends_for_a_crash_loop_and_forgets_what_lies_behind():
    quick = Patience()
    assert [quick.after(0) for _ in range(6)] == [0, 1, 2, 4, 8, None]
    now_and_then = Patience()
    assert {now_and_then.after(45) for _ in range(100)} == {0}
    recovering = Patience()
    for _ in range(5):
        recovering.after(0)
    assert recovering.after(60) == 4 and recovering.after(3600) == 0


def test_the_log_has_every_restart_and_that_the_server_is_back(board, monkeypatch, caplog):
    ended = SimpleNamespace(stop=lambda **_: None)
    log = SimpleNamespace(forget=lambda: None, last_lines=lambda: "  | last")
    supervisor = Supervisor(lambda _: ended, ServeOptions(), board, log)
    starts = iter([None] * 6)  # each succeeds, and each server dies at once
    monkeypatch.setattr(supervisor, "_prober", lambda: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(supervisor, "_wait_loaded", lambda *_: next(starts))
    monkeypatch.setattr(supervisor, "_watch", lambda *_: "The server exited.")
    monkeypatch.setattr(supervisor._ending, "wait", lambda _: False)
    monkeypatch.setattr(process_module, "FORGIVEN_AFTER_S", math.inf)  # no time counts here
    with pytest.raises(ServerFailed, match="It failed 6 times in quick succession"):
        supervisor._serve(None)
    kinds = [record.saccade_fields["event"] for record in caplog.records]
    assert kinds == ["restarting", "server_back"] * 5
    texts = [record.message for record in caplog.records if "Restarting" in record.message]
    assert texts[0].endswith("Restarting it now.") and texts[3].endswith("Restarting it in 4 s.")
    assert "answers again after" in caplog.records[-1].message


SAID = {
    "the server": "[request id: 1] Exceeds maximum queue size",
    "a full lane": "the queue of variant 'nac-b1000-fp32' is full: 256 requests are waiting",
    "a door": "variant 'nac-b1000-fp32' is busy: it could answer this request in about 2 s",
    "a lane": "the request's timeout ran out before variant 'nac-b1000-fp32' was free",
}


@pytest.mark.parametrize("said", SAID)
def test_all_words_for_overload_are_known(said):
    error = SimpleNamespace(message=lambda: SAID[said], status=lambda: "StatusCode.UNAVAILABLE")
    assert is_queue_full(error)
    assert f"nac is overloaded: {SAID[said]}." in str(explain(error, "here", "nac", 1))


def test_a_dead_variant_is_not_a_full_one():
    text = "variant 'nac-b1000-fp32' failed; see the server's log"
    assert not is_queue_full(SimpleNamespace(message=lambda: text))


def test_the_server_answers_before_the_connection_gives_up():
    call = with_deadline({"inputs": []}, 0.3)
    assert call["timeout"] == 300_000 and call["client_timeout"] == pytest.approx(0.4)
    assert with_deadline({}, 1e300)["timeout"] < 2**63
    names = {with_deadline({}, 1)["request_id"].partition("/")[0] for _ in range(3)}
    assert len(names) == 1 and names != {""}
