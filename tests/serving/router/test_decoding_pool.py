# SPDX-License-Identifier: Apache-2.0
"""Lanes with several groups in flight, and the threads that decode for all of them."""

import os
import threading
import time

import pytest
from support.serving.routers import src


class Images:
    """What the pool decodes: one image for each row, held until `go`."""

    def __init__(self, lane, ticket, go):
        self.lane, self.ticket, self.go, self.seconds = lane, ticket, go, 0.001
        self.sizes = [ticket.megapixels / ticket.rows] * ticket.rows
        self.indices, self.complete, self.nice = [], None, {}

    def __len__(self):
        return len(self.sizes)

    def decode(self, index):
        self.indices.append(index)
        self.nice[index] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        assert self.go.wait(30)
        self.lane.decoded(1.0, 1000.0)
        if self.ticket.caller == "broken":
            raise src.outcomes.Refused("broken", "invalid_image")

    def end(self, *, complete):
        self.complete = complete


class Pooled:
    """Lanes that share a pool of three threads; `decoding` is what was given to it, in order."""

    def __init__(self, **in_flight):
        self.go, self.answering = threading.Event(), threading.Event()
        self.answering.set()
        self.decoding, self.groups, self.at_once = [], [], 0
        self.running = 0
        self.pool = src.decoding_pool.DecodingPool(3, self.begin)
        self.lanes = {
            name: src.lane.Lane(
                name, self.answer, group_rows=4, in_flight=number, decoders=3, wake=self.pool.wake
            )
            for name, number in in_flight.items()
        }
        self.pool.serve(self.lanes.values())

    def begin(self, lane, ticket):
        self.decoding.append(Images(lane, ticket, self.go))
        return self.decoding[-1]

    def answer(self, lane, group):
        self.groups.append([ticket.caller or ticket.rows for ticket in group])
        self.running += 1
        self.at_once = max(self.at_once, self.running)
        assert self.answering.wait(30)
        self.running -= 1
        return 1.0

    def given(self):
        """How many images threads have begun."""
        return sum(len(one.indices) for one in self.decoding)

    def close(self):
        self.go.set()
        self.answering.set()
        for lane in self.lanes.values():
            lane.close()
        self.pool.close()


@pytest.fixture
def pooled(pb):
    made = []

    def make(**in_flight):
        made.append(Pooled(**in_flight))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_as_many_groups_are_in_flight_as_the_model_has_instances(pooled, ticket, eventually):
    made = pooled(v=3)
    made.answering.clear()
    for rows in (4, 4, 4, 2, 2):
        made.lanes["v"].offer(ticket(rows))
    eventually(lambda: len(made.groups) == 3, 5)
    time.sleep(0.05)
    assert made.at_once == 3 and made.lanes["v"].report()["waiting"] == 2
    made.answering.set()
    eventually(lambda: len(made.groups) == 4, 5)
    assert sorted(made.groups) == [[2, 2], [4], [4], [4]]


def test_a_wait_is_shared_by_the_instances(pooled, ticket, eventually):
    made = pooled(v=4)
    lane = made.lanes["v"]
    lane.pace.run.add(1, 1.0)
    made.answering.clear()
    for running in range(4):
        assert lane.offer(ticket(caller="a", left_s=1.2)) == "", "an instance is free"
        eventually(lambda running=running: len(made.groups) == running + 1, 5)
    for _ in range(4):
        lane.offer(ticket(caller="a"))
    # A second until an instance is free, one for the four that wait, one for itself.
    assert "is busy" in lane.offer(ticket(caller="a", left_s=2.5))
    assert lane.offer(ticket(caller="a", left_s=4)) == ""


def test_the_images_of_one_request_are_decoded_by_all_threads(pooled, ticket, eventually):
    made = pooled(v=1)
    made.lanes["v"].offer(ticket(4, megapixels=48.0))
    eventually(lambda: made.given() == 3, 5)
    made.go.set()
    eventually(lambda: made.groups == [[4]], 5)
    (images,) = made.decoding
    assert sorted(images.indices) == [0, 1, 2, 3] and images.complete


def test_what_is_decoded_does_not_wait_for_what_is_not(pooled, ticket, eventually):
    made = pooled(v=1)
    made.lanes["v"].offer(ticket(2, megapixels=50.0))
    eventually(lambda: made.given() == 2, 5)
    made.lanes["v"].offer(ticket())  # also of the same caller
    eventually(lambda: made.groups == [[1]], 5)
    made.go.set()
    eventually(lambda: made.groups == [[1], [2]], 5)


def test_what_the_pool_decodes_is_not_taken_off_the_models_time(pooled, ticket, eventually):
    made = pooled(v=1)
    lane = made.lanes["v"]
    made.answering.clear()
    lane.offer(ticket())
    eventually(lambda: made.groups, 5)
    lane.offer(ticket(megapixels=12.0))
    eventually(lambda: made.given() == 1, 5)
    made.go.set()
    eventually(lambda: lane.pace.decode.of(1), 5)
    made.answering.set()
    eventually(lambda: lane.report()["groups"] == 2, 5)
    assert lane.pace.decode.of(1) == 1000 and lane.pace.run.of(1) > 0


def test_large_images_have_threads_of_low_priority(pooled, ticket, eventually):
    made = pooled(v=1, w=1)
    for _ in range(4):
        made.lanes["v"].offer(ticket(megapixels=50.0, caller="posters"))
    eventually(lambda: made.given() == 3, 5)
    time.sleep(0.05)
    assert made.given() == 3
    made.lanes["w"].offer(ticket(megapixels=12.0))
    eventually(lambda: made.given() == 4, 5)
    low = src.decoding_pool.LARGE_NICE
    assert [max(one.nice.values()) for one in made.decoding] == [low, low, low, 0]


def test_callers_get_equal_megapixels(pooled, ticket, eventually):
    made = pooled(v=1, w=1)
    for _ in range(5):
        made.lanes["v"].offer(ticket(megapixels=20.0, caller="large"))
    eventually(lambda: made.given() == 3, 5)
    for _ in range(2):
        made.lanes["w"].offer(ticket(megapixels=1.0, caller="small"))
    made.go.set()
    eventually(lambda: sum(map(len, made.groups)) == 7, 5)
    order = [one.ticket.caller for one in made.decoding[3:]]
    assert order == ["large", "small", "small", "large"]  # who is new has as much as the others


def test_the_earliest_deadline_is_decoded_first(pooled, ticket, eventually):
    made = pooled(v=1, w=1, x=1)
    for _ in range(3):
        made.lanes["v"].offer(ticket(megapixels=12.0))
    eventually(lambda: made.given() == 3, 5)
    made.lanes["w"].offer(ticket(megapixels=12.0, left_s=1000))
    made.lanes["x"].offer(ticket(megapixels=12.0, left_s=500))
    made.go.set()
    eventually(lambda: made.given() == 5, 5)
    assert [one.lane.name for one in made.decoding[3:]] == ["x", "w"]


def test_an_image_that_is_refused_ends_its_request_alone(pooled, ticket, eventually):
    made = pooled(v=1)
    bad, good = ticket(4, megapixels=48.0, caller="broken"), ticket(megapixels=12.0)
    made.lanes["v"].offer(bad)
    eventually(lambda: made.given() == 3, 5)
    made.lanes["v"].offer(good)
    made.go.set()
    eventually(lambda: made.groups == [[1]], 5)
    eventually(lambda: bad.sender.reasons == ["invalid_image"], 5)
    assert len(made.decoding[0].indices) == 3 and made.decoding[0].complete is False


def test_memory_bounds_what_is_decoded_at_once(pooled, ticket, eventually):
    made = pooled(v=1)
    made.pool._most_megapixels = 30.0
    for _ in range(4):
        made.lanes["v"].offer(ticket(megapixels=12.0))
    eventually(lambda: made.given() == 2, 5)
    time.sleep(0.05)
    assert made.given() == 2
    made.go.set()
    eventually(lambda: sum(map(len, made.groups)) == 4, 5)
