# SPDX-License-Identifier: Apache-2.0
"""A lane of the router without a server: who is refused at its door, who is answered, and when."""

import threading
import time
from types import SimpleNamespace

import pytest
from support.serving.routers import src

FAR_S = 1e6  # a timeout that does not run out in a test


@pytest.fixture
def lane(pb):
    """A lane whose first group is held until `go` is set; `groups` are the callers of each."""
    go, groups, may_step = threading.Event(), [], threading.Event()

    def answer(lane, group):
        groups.append([ticket.caller or ticket.rows for ticket in group])
        while not go.wait(0.001):
            if may_step.is_set():
                may_step.clear()
                lane.step()
        return 0.0  # the pace stays as the test sets it

    made = src.lane.Lane("nac-b1000-fp32", answer, group_rows=8)
    made.go, made.groups, made.may_step = go, groups, may_step
    yield made
    go.set()
    made.close()


def hold(lane, ticket):
    """Let the lane be busy with a first request."""
    assert lane.offer(ticket()) == ""
    while not lane.groups:
        time.sleep(0.001)
    lane.groups.clear()


def rest(lane, count):
    """The groups after the held one, once they are as many."""
    lane.go.set()
    end = time.monotonic() + 30
    while sum(map(len, lane.groups)) < count and time.monotonic() < end:
        time.sleep(0.001)
    return lane.groups


def test_groups_of_what_waits(lane, ticket):
    hold(lane, ticket)
    for rows in (3, 5, 1, 64):
        assert lane.offer(ticket(rows)) == ""
    # A request larger than a group is a group of its own.
    assert rest(lane, 4) == [[3, 5], [1], [64]]


def test_the_door_refuses_what_cannot_be_answered_in_its_time(lane, ticket):
    lane.pace.run.add(1, 0.1)
    lane.pace.decode.add(1, 0.01)
    assert lane.offer(ticket(rows=64, left_s=0.2)) == "", "an idle lane takes all, to measure"
    while not lane.groups:
        time.sleep(0.001)
    held_s = 6.4
    assert lane.offer(ticket(left_s=2 * held_s)) == ""
    refused = lane.offer(ticket(left_s=1))
    assert "'nac-b1000-fp32' is busy" in refused and "try again in about" in refused
    # Its own decoding counts: 64 photographs of 12 megapixels take 7.7 s by this pace.
    assert lane.offer(ticket(left_s=1.5 * held_s)) == ""
    assert "is busy" in lane.offer(ticket(left_s=1.5 * held_s, megapixels=768.0))
    assert "allow more time" in lane.offer(ticket(rows=64, left_s=1))
    assert lane.offer(ticket()) == "", "whoever has no timeout can wait"
    assert "is full" in lane.offer(ticket(rows=1000)), "but not for minutes"


def test_an_idle_lane_refuses_what_it_knows_it_cannot_do(lane, ticket):
    """Otherwise a caller with short deadlines takes a slow model from all others."""
    lane.go.set()
    for _ in range(src.pace.AVERAGED_FROM):
        lane.service.add(1, 0.2)
        lane.pace.run.add(1, 0.2)
    refused = lane.offer(ticket(rows=64, left_s=1))
    assert "is busy" not in refused and "could answer this request in about" in refused
    assert "send less in one request" in refused
    assert lane.offer(ticket(left_s=1)) == "", "one row fits"
    lane.service._slow_s = 0.01
    time.sleep(0.05)
    assert lane.offer(ticket(rows=64, left_s=1)) == "", "after a rest it is measured again"


@pytest.mark.parametrize("callers", [("", ""), ("a", "a")])
def test_a_full_lane_refuses_at_once_with_a_hint(lane, ticket, callers):
    hold(lane, ticket)
    assert {lane.offer(ticket(caller=callers[0])) for _ in range(256)} == {""}
    refused = lane.offer(ticket(caller=callers[1]))
    assert "'nac-b1000-fp32' is full: 256 requests are waiting" in refused
    assert "try again in about" in refused


def test_a_full_lane_is_one_of_many_bytes_too(lane, ticket):
    hold(lane, ticket)
    assert lane.offer(ticket(size=400 * 2**20)) == ""
    assert "is full" in lane.offer(ticket(size=200 * 2**20))
    assert lane.offer(ticket(size=2**20)) == ""


def test_a_thousand_requests_of_one_caller_do_not_starve_another(lane, ticket):
    hold(lane, ticket)
    crowd = [ticket(caller="crowd") for _ in range(1000)]
    taken = [ticket for ticket in crowd if lane.offer(ticket) == ""]
    assert len(taken) == 256
    # One of the crowd's, the newest, makes room.
    assert lane.offer(ticket(caller="other")) == ""
    assert [ticket for ticket in taken if ticket.sender.error] == [taken[-1]]
    assert taken[-1].sender.error.code() == "unavailable"
    assert "is full" in taken[-1].sender.error.message()
    assert "other" in rest(lane, 8)[0], "it is in the very next group"


def test_callers_get_equal_work_not_equal_requests(lane, ticket):
    hold(lane, ticket)
    for _ in range(12):
        lane.offer(ticket(rows=4, caller="large"))
    for _ in range(12):
        lane.offer(ticket(rows=1, caller="small"))
    groups = rest(lane, 24)
    served = [name for group in groups for name in group][:10]
    assert served.count("small") == 4 * served.count("large")


def test_a_caller_is_only_charged_for_its_share_of_the_wait(lane, ticket):
    lane.pace.run.add(1, 0.1)
    hold(lane, ticket)
    for _ in range(200):
        lane.offer(ticket(caller="crowd"))
    assert "is busy" in lane.offer(ticket(caller="crowd", left_s=1))
    assert lane.offer(ticket(caller="other", left_s=1)) == ""


def test_newest_first_when_late(lane, ticket):
    hold(lane, ticket)
    for rows in (3, 4, 5):
        assert lane.offer(ticket(rows, left_s=10 if rows == 3 else 30)) == ""
    # It turned out slower than thought: the oldest cannot be answered any more.
    lane.pace.run.add(1, 4)
    assert rest(lane, 3) == [[5], [4], [3]]


def test_nobody_joins_a_group_that_would_make_another_late(lane, ticket):
    hold(lane, ticket)
    for rows in (1, 2):
        assert lane.offer(ticket(rows, left_s=20)) == ""
    lane.pace.run.add(1, 9)
    assert rest(lane, 2) == [[1], [2]]


def test_whoever_has_no_time_left_is_told_while_the_lane_is_busy(lane, ticket):
    hold(lane, ticket)
    late, patient = ticket(left_s=0.05), ticket(left_s=FAR_S)
    assert lane.offer(late) == lane.offer(patient) == ""
    time.sleep(0.1)
    lane.expire()
    assert late.sender.error.code() == "unavailable"
    assert "timeout ran out" in late.sender.error.message()
    assert rest(lane, 1) == [[1]]
    assert patient.sender.error is None


def test_every_refusal_of_a_lane_has_its_reason(lane, ticket):
    hold(lane, ticket)
    late = ticket(left_s=0.05)
    lane.offer(late)
    time.sleep(0.1)
    lane.expire()
    assert late.sender.reasons == ["timeout"] and 0.05 < late.sender.waits_s[0] < 60
    *_, removed, last = crowd = [ticket(caller="crowd") for _ in range(257)]
    for each in crowd:
        lane.offer(each)
    assert last.sender.reasons == ["queue_full"] and not last.sender.waits_s
    lane.offer(ticket(caller="other"))
    assert removed.sender.reasons == ["queue_full"] and len(removed.sender.waits_s) == 1
    lane.pace.run.add(1, 9)
    hurried, huge = ticket(left_s=1), ticket(rows=64)
    lane.offer(hurried)
    lane.offer(huge)
    assert hurried.sender.reasons == ["busy"] and huge.sender.reasons == ["queue_full"]


def test_a_lane_tells_of_its_progress(lane, ticket):
    idle = lane.report()
    assert (idle["groups"], idle["step_s"], idle["waiting"]) == (0, 0, 0)
    hold(lane, ticket)
    lane.offer(ticket())
    time.sleep(0.05)
    busy = lane.report()
    assert busy["waiting"] == 1 and busy["running_s"] >= busy["step_s"] >= 0.05
    lane.may_step.set()
    time.sleep(0.05)
    assert lane.report()["step_s"] < busy["step_s"] + 0.05 <= lane.report()["running_s"]
    rest(lane, 1)
    lane.close()
    assert lane.report()["groups"] == 2


@pytest.mark.parametrize(
    ("row_s", "longest_s"), [(None, 600), (0.01, 60), (0.5, 320), (2.0, 600), (10.0, 1920)]
)
def test_the_longest_step_is_bounded_unless_the_largest_batch_is_longer(lane, row_s, longest_s):
    if row_s is not None:
        lane.pace.run.add(1, row_s)
    assert lane.report()["longest_step_s"] == longest_s


@pytest.mark.parametrize(
    ("row_s", "waiting", "refused"),
    [(1.0, 56, False), (1.0, 70, True), (10.0, 20, False), (10.0, 40, True)],
)
def test_a_minute_of_work_may_wait_or_so_many_samples(lane, ticket, row_s, waiting, refused):
    lane.pace.run.add(1, row_s)
    hold(lane, ticket)
    said = [lane.offer(ticket()) for _ in range(waiting)]
    assert ("is full" in said[-1]) == refused and not said[15]


def test_a_lane_survives_what_nobody_foresaw(pb, ticket):
    def answer(lane, group):
        if group[0].rows == 2:
            raise RuntimeError("unforeseen")
        return 1.0

    made = src.lane.Lane("v", answer, group_rows=1)
    bad, good = ticket(2), ticket(1)
    made.offer(bad)
    made.offer(good)
    made.close()
    assert bad.sender.error.code() == "internal" and good.sender.error is None
    assert made.report()["groups"] == 2


def test_a_mean_forgets(pb):
    mean = src.pace.Mean()
    assert mean.of(3) == 0
    mean.add(0, 5)
    assert mean.of(3) == 0
    mean.add(2, 2)
    assert mean.of(3) == 3
    for _ in range(100):
        mean.add(10, 1)
    assert mean.of(1) == pytest.approx(0.1, rel=0.01)


def test_a_timeout_that_is_none_never_reaches_a_lane(pb):
    assert src.backlog.deadline(0, 5.0) is None and src.backlog.deadline(1_500_000, 5.0) == 6.5
    assert src.backlog.deadline(2**62, 0.0) == src.backlog.LONGEST_US / 1e6
    for given in (2**64 - 1, -1):
        with pytest.raises(src.choose.RequestRefused, match="timeout is -1 microseconds"):
            src.backlog.deadline(given, 5.0)
    assert [src.backlog.caller_of(each) for each in ("", "7", "a/7", "a/b/c")] == [
        "",
        "",
        "a",
        "a",
    ]


def test_the_time_given_to_a_group_fits_the_server(pb, ticket):
    assert src.calls.remaining_us([ticket(left_s=5), ticket()]) == 0
    assert src.calls.remaining_us([ticket(left_s=-5)]) == 1
    assert 4e6 < src.calls.remaining_us([ticket(left_s=5), ticket(left_s=1)]) <= 5e6
    forever = SimpleNamespace(left_s=7 * 24 * 3600.0)
    assert src.calls.remaining_us([forever]) < 2**63


def test_a_request_gets_nine_tenths_of_its_time(lane, ticket):
    lane.pace.run.add(1, 20)
    hold(lane, ticket)  # for 20 s by the estimate, and the next one takes as long
    assert "is busy" in lane.offer(ticket(left_s=42))
    assert lane.offer(ticket(left_s=46)) == ""


def test_nobody_makes_room_for_a_caller_who_has_as_much_waiting(lane, ticket):
    hold(lane, ticket)
    waiting = [ticket(caller=str(number)) for number in range(256)]
    assert {lane.offer(ticket) for ticket in waiting} == {""}
    assert "is full" in lane.offer(ticket(caller="late"))
    assert not any(ticket.sender.error for ticket in waiting)


def test_decoding_is_not_the_models_time(pb, ticket):
    def answer(lane, group):
        lane.decoded(1.0, 1000.0)
        return 1.0

    made = src.lane.Lane("v", answer, group_rows=1)
    made.offer(ticket())
    made.close()
    assert made.pace.decode.of(1) == 1000
    assert made.pace.run.of(1) < -900, "what was said to be decoding is taken off"


def test_whoever_comes_after_a_pause_gets_no_more_than_a_share(pb, ticket):
    line, served = src.backlog.Backlog(), []

    def serve(count):
        for _ in range(count):
            served.extend(each.caller for each in line.take(1, lambda work, megapixels: 0.0))

    for _ in range(20):
        line.add(ticket(caller="steady"))
    serve(10)
    for _ in range(10):
        line.add(ticket(caller="back again"))
    serve(6)
    assert 3 <= served[10:].count("back again") <= 4


def test_others_go_first_and_those_behind_go_alone(lane, ticket):
    hold(lane, ticket)
    for _ in range(3):
        lane.offer(ticket(caller="hard", behind=True))
    for _ in range(3):
        lane.offer(ticket(caller="usual"))
    assert rest(lane, 6) == [["usual"] * 3, ["hard"], ["hard"], ["hard"]]


def test_those_behind_get_a_small_part_of_the_time(pb, ticket, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(src.backlog.time, "monotonic", lambda: now_s[0])
    backlog = src.backlog.Backlog()

    def take(after_s):
        now_s[0] += after_s
        return [one.caller for one in backlog.take(8, lambda *_: 0.0)]

    for _ in range(4):
        backlog.add(ticket(caller="hard", behind=True))
    backlog.add(ticket(caller="usual"))
    assert take(0.0) == ["usual"] and take(0.0) == ["hard"]
    assert take(0.1) == [] and backlog.pause_s == pytest.approx(0.9), "it took a tenth of a second"
    backlog.add(ticket(caller="usual"))
    assert take(0.5) == ["usual"] and take(0.1) == [], "others need not wait"
    assert take(0.31) == ["hard"]
    now_s[0] += src.backlog.QUIET_S + 0.01
    assert [take(0.0), take(0.0)] == [["hard"], ["hard"]], "while nobody else is there"
    backlog.add(ticket(caller="usual"))
    backlog.add(ticket(caller="hard", behind=True))
    assert take(0.1) == ["usual"] and take(0.0) == []
    backlog.others_s = -1e9
    assert take(0.0) == ["hard"], "before the lane closes"


def test_those_behind_make_room_first(pb, ticket):
    backlog = src.backlog.Backlog()
    for at in range(src.backlog.MAX_REQUESTS):
        backlog.add(ticket(caller=f"hard {at}", behind=True))
    large = ticket(rows=64, caller="usual")
    (removed,) = backlog.make_room(large)
    assert removed.behind
    backlog.add(large)
    (removed,) = backlog.make_room(ticket(rows=128, caller="larger"))
    assert removed.behind, "although the one in front has far more work"
    backlog = src.backlog.Backlog()
    for at in range(src.backlog.MAX_REQUESTS - 1):
        backlog.add(ticket(caller=f"hard {at}", behind=True))
    backlog.add(large)
    assert backlog.make_room(ticket(caller="hard 1", behind=True)) is None
    assert backlog.ahead_of(ticket(caller="other"))[0] == 1.0, "an equal part of what is in front"
    assert backlog.ahead_of(ticket(caller="hard 1", behind=True))[0] >= 64


def test_a_lane_with_a_pause_goes_on_by_itself(lane, ticket, eventually):
    lane.go.set()
    lane.offer(ticket(caller="usual"))
    for _ in range(3):
        lane.offer(ticket(caller="hard", behind=True))
    eventually(lambda: sum(group == ["hard"] for group in lane.groups), 3)
