# SPDX-License-Identifier: Apache-2.0
"""Requests sized by time, on a clock that a test moves, with a stand-in for the server."""

from types import SimpleNamespace

import numpy as np
import pytest

from saccade.core.errors import SaccadeError, ServerFailed
from saccade.serving.client import request_sizes, wire
from saccade.serving.client.connection import ServerRefusedImage
from saccade.serving.client.operations import finished
from saccade.serving.client.request_sizes import FIRST_S, LEAST_S, Pacing, RequestSizes, Watch
from saccade.serving.client.wire import Call, array_call, image_input

TARGET_S, FIRST_ROWS = request_sizes.TARGET_S, request_sizes.FIRST_ROWS
FAST_S, VIT_B_S, HUGE_S = 0.001, 0.17, 10.0  # an image


@pytest.fixture(autouse=True)
def usual_sizes(monkeypatch):
    monkeypatch.setattr(request_sizes, "TARGET_S", TARGET_S)
    monkeypatch.setattr(request_sizes, "FIRST_ROWS", FIRST_ROWS)


class Server:
    """Answers with the rows that it got; every image takes `row_s`, every request `request_s`."""

    def __init__(self, row_s=FAST_S, request_s=0.0):
        self.now, self.row_s, self.request_s = 0.0, row_s, request_s
        self.sent: list[Call] = []
        self.bad: set[int] = set()  # images that it refuses
        self.pacing = Pacing(clock=lambda: self.now)

    def infer(self, call):
        self.sent.append(call)
        (rows,) = call.inputs.values()
        for index, row in enumerate(rows[:, 0]):
            if int(row) in self.bad:
                raise ServerRefusedImage("m", "", index, "is broken")
        self.now += self.request_s + self.row_s * call.rows
        if call.timeout_s < self.request_s + self.row_s * call.rows:
            raise ServerFailed("no answer.", status="DEADLINE_EXCEEDED")
        return rows[:, 0].tolist()

    def ask(self, call, watch=None):
        def operation():
            results = yield call
            return [row for result in results for row in result]

        steps = self.pacing.requests(operation(), *([watch] if watch else []))
        return finished(steps, lambda: None, self.infer)

    @property
    def sizes(self):
        return [call.rows for call in self.sent]


def images(count, **more):
    files = [b"%d" % index for index in range(count)]
    return array_call({"image": image_input(files)}, (), {"budget": "1"}, **more)


def numbers(count):
    return [b"%d" % index for index in range(count)]


@pytest.mark.parametrize(
    ("row_s", "sizes"),
    [
        (FAST_S, [1, 4, 16, 64, 64, 51]),
        (VIT_B_S, [1, 4, *[5] * 39]),
        (0.6, [1] * 200),
        (HUGE_S, [1] * 200),
    ],
)
def test_requests_grow_while_they_take_less_than_a_second(row_s, sizes):
    server = Server(row_s)
    assert server.ask(images(200)) == numbers(200)
    assert server.sizes == sizes
    server.sent.clear()
    server.ask(images(3))
    assert server.sizes == ([3] if row_s < 0.3 else [1] * 3)  # the pace is remembered


def test_a_request_that_takes_longer_makes_the_next_one_smaller():
    server = Server()
    server.ask(images(85))
    server.row_s, server.sent = 0.1, []
    assert server.ask(images(100)) == numbers(100)
    assert server.sizes == [64, 10, 10, 10, 6]
    server.row_s, server.sent = FAST_S, []
    server.ask(images(100))
    assert server.sizes == [10, 40, 50]  # the last one was small because no image was left


def test_a_small_call_does_not_make_the_next_one_small():
    server = Server()
    server.ask(images(85))
    server.ask(images(1))
    server.sent = []
    server.ask(images(64))
    assert server.sizes == [64]


def test_kinds_of_requests_have_their_own_pace():
    server = Server()
    server.ask(images(85))
    server.sent = []
    server.ask(array_call({"tokens": np.zeros((5, 1))}, (), {}))
    server.ask(array_call({"image": image_input([b"1"] * 5)}, (), {"budget": "0.5"}))
    assert server.sizes == [1, 4, 1, 4]


def test_the_time_limit_follows_the_pace_that_was_measured():
    sizes = RequestSizes()
    assert sizes.limit_s(1) == FIRST_S
    sizes.add(1, HUGE_S)
    assert (sizes.rows, sizes.limit_s(1), sizes.limit_s(2)) == (1, 100.0, 200.0)
    sizes.add(1, FAST_S)
    assert sizes.limit_s(64) == LEAST_S


def test_a_time_limit_of_the_caller_stays_and_requests_fit_into_it():
    sizes = RequestSizes(timeout_s=0.4)
    assert sizes.limit_s(1) == 0.4
    sizes.add(1, 0.01)
    sizes.add(4, 0.04)
    assert (sizes.rows, sizes.limit_s(10)) == (10, 0.4)


def test_an_answer_in_no_time_is_one():
    sizes = RequestSizes()
    sizes.add(1, 0.0)
    assert sizes.rows == 4


def test_requests_have_at_most_so_many_bytes(monkeypatch):
    monkeypatch.setattr(wire, "MAX_REQUEST_BYTES", 10)
    server = Server(0.0)
    server.ask(images(10))  # one byte each
    files = image_input([b"1" * 6, b"2" * 6, b"3", b"4" * 60, b"5"])
    large = array_call({"image": files}, (), {"budget": "1"})
    server.sent = []
    server.ask(large)
    assert server.sizes == [1, 2, 1, 1]
    server.ask(array_call({"tokens": np.zeros((9, 1), np.float32)}, (), {}))
    assert max(server.sizes[4:]) == 2  # of 4 bytes


def test_where_the_index_counts_each_request_says_its_own():
    def indices(call):
        first = int(call.parameters.get("first", 0))
        return list(range(first, first + call.rows))

    for row_s in (FAST_S, VIT_B_S, 0.4):
        server = Server(row_s)
        server.ask(images(150, first_row="first"))
        seen = [index for call in server.sent for index in indices(call)]
        assert seen == [index % 64 for index in range(150)]


def test_a_bad_image_is_left_out_and_the_others_keep_their_index():
    server, seen, left_out = Server(), [], []
    server.bad = {0, 3, 40, 149}
    watch = Watch(seen.append, lambda index, error: left_out.append((index, error.reason)))
    answers = server.ask(images(150, first_row="first"), watch)
    assert answers == [row for row in numbers(150) if int(row) not in server.bad]
    assert left_out == [(index, "is broken") for index in sorted(server.bad)]
    assert sum(seen) == 146
    with pytest.raises(
        ServerRefusedImage, match=r"refuses the request: image 3: is broken"
    ) as refused:
        server.bad = {3}
        server.ask(images(10))
    assert refused.value.index == 3
    with pytest.raises(ServerRefusedImage):  # no image is left
        server.bad = {0, 1}
        server.ask(images(2), watch)


def test_only_the_first_call_of_an_operation_is_watched():
    server, seen = Server(), []

    def operation():
        yield images(2)
        yield array_call({"tokens": np.zeros((5, 1))}, (), {})

    finished(server.pacing.requests(operation(), Watch(seen.append)), lambda: None, server.infer)
    assert sum(seen) == 2


def test_a_failure_says_how_far_it_came():
    server = Server(VIT_B_S)
    server.ask(images(20))
    server.request_s, server.now = 100.0, 0.0
    with pytest.raises(ServerFailed, match=r"no answer\. 0 of 7 samples were answered in 101 s"):
        server.ask(images(7))
    server = Server()
    tries = iter([[b"0"], [b"1"], SaccadeError("input x of sample 2 is 9.")])

    def infer(call):
        answer = next(tries)
        if isinstance(answer, SaccadeError):
            raise answer
        return answer

    server.infer, server.pacing = infer, Pacing(clock=lambda: server.now)
    steps = server.pacing.requests(one for one in [images(20)])
    with pytest.raises(SaccadeError, match=r"^input x of sample 7 is 9\.$"):
        finished(steps, lambda: None, infer)


def test_the_view_is_passed_through():
    def operation():
        view = yield None
        return view

    view = SimpleNamespace()
    assert finished(Pacing().requests(operation()), lambda: view, None) is view
