# SPDX-License-Identifier: Apache-2.0
"""When a measurement stops, on values and times that a test gives: nothing is measured here."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.frontier import enough_threads
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.data.splits import drawn_rows
from saccade.models.scores.results import EvaluationResult, paired_bootstrap, proportion, wilson
from saccade.serving.bench import in_process, work, workload
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.stopping import (
    Deadline,
    duration_text,
    first_look,
    next_look,
    rounds_suffice,
    samples_needed,
)

STEADY, DRIFTING = [100.0, 101.0, 99.0], [50.0, 80.0, 130.0]


@dataclass
class Clock:
    """A clock that a test moves."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def answers(n: int, right: float, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).random(n) < right).astype(float)


def test_enough_samples_are_those_that_make_intervals_narrow():
    half = answers(400, 0.5)
    needed = samples_needed({"one": half})
    low, high = wilson(round(half.mean() * needed), needed)
    assert 0.0095 < (high - low) / 2 < 0.0102  # one point
    # A tenth of the answers differ: known to half a point, whatever both score.
    other = np.where(np.arange(400) % 10 == 0, 1 - half, half)
    both = samples_needed({"one": half, "other": other})
    times = -(-both // 400)
    low, high = paired_bootstrap(np.tile(half, times)[:both], np.tile(other, times)[:both])
    assert both > needed and 0.0045 < (high - low) / 2 < 0.0055


def test_a_large_difference_need_not_be_known_to_half_a_point():
    worst, best = answers(400, 0.1), answers(400, 0.9)
    assert samples_needed({"best": best, "worst": worst}) == max(
        samples_needed({"best": best}), samples_needed({"worst": worst})
    )


def test_equal_answers_so_far_are_not_taken_for_certain():
    same = {"one": np.ones(100), "other": np.ones(100)}
    assert samples_needed(same) > 1000
    assert samples_needed({name: np.ones(1600) for name in same}) < 1600


def test_a_score_without_an_upper_end_is_known_relatively():
    cider = np.random.default_rng(0).normal(3.9, 2, 500)
    assert samples_needed({"one": cider}) == pytest.approx(
        samples_needed({"one": cider * 10}), rel=0.02
    )


@pytest.mark.parametrize(
    ("scored", "needed", "affordable", "expected"),
    [
        (1000, 900, 5000, None),  # narrow
        (1000, 3000, 5000, 3000),
        (1000, 30_000, 50_000, 4000),  # the estimate may be wrong: look again soon
        (1000, 3000, 2000, 2000),  # until the time is over
        (1000, 3000, 1200, None),  # too little would be added
        (1000, 3000, 0, None),
    ],
)
def test_the_next_look(scored, needed, affordable, expected):
    assert next_look(scored, needed, affordable) == expected


def test_the_first_look_takes_ten_seconds_or_what_there_is():
    assert first_look(1000, 300) == 10_000
    assert first_look(1000, 1) == 1000
    assert first_look(6, 300) == 256


@pytest.mark.parametrize(
    ("rates", "left_s", "expected"),
    [
        ({"one": STEADY}, 100, True),
        ({"one": [100.0, 100.0]}, 100, False),  # two rounds are equal by chance
        ({"one": DRIFTING}, 100, False),
        # What slows the machine slows both: their ratio is known.
        ({"one": DRIFTING, "other": [2.0 * rate for rate in DRIFTING]}, 100, True),
        ({"one": STEADY, "other": DRIFTING}, 100, False),
        ({"one": DRIFTING}, 0, True),  # no time left
        ({"one": DRIFTING[:1]}, 0, False),  # but one round has no interval
    ],
)
def test_rounds_suffice(rates, left_s, expected):
    assert rounds_suffice(rates, left_s) is expected


def test_a_round_that_does_not_fit_is_not_begun():
    noisy = {"a": [1.0, 2.0], "b": [2.0, 1.0]}
    assert not rounds_suffice(noisy, 10.0, 9.0) and rounds_suffice(noisy, 8.0, 9.0)
    assert not rounds_suffice({name: own[:1] for name, own in noisy.items()}, 8.0, 9.0)


def test_a_deadline_counts_from_its_start_and_has_parts():
    clock = Clock(100.0)
    whole = Deadline(60, clock)
    clock.now = 120
    half = whole.part(0.5)
    assert (whole.left, half.left) == (40, 20)
    clock.now = 150
    assert (whole.left, half.left) == (10, 0)
    assert (duration_text(44.6), duration_text(300)) == ("45 s", "5 min")


@dataclass
class Task:
    """A task whose samples take time by a clock; `limits` are the numbers that were scored."""

    clock: Clock
    total: int
    seconds_each: float
    right: tuple[float, float] = (0.6, 0.62)

    def __post_init__(self) -> None:
        self.limits: list[int | None] = []

    def __call__(self, models: Any, options: EvaluateOptions, _: Any) -> tuple[Any, ...]:
        count = self.total if options.limit is None else min(options.limit, self.total)
        self.limits.append(options.limit)
        self.clock.now += count * self.seconds_each
        return tuple(
            EvaluationResult(
                name, "top1", "data", "", (proportion("top-1", values),), values[:count]
            )
            for name, values in zip("ab", (answers(self.total, p) for p in self.right), strict=True)
        )


def scored(
    task: Task, monkeypatch: pytest.MonkeyPatch, *, seconds: float, limit: int | None = None,
    data: str = __file__,
) -> tuple[Any, EvaluateOptions]:  # fmt: skip
    monkeypatch.setattr(workload, "scores_of", task)
    return workload.scores_within(
        [],
        EvaluateOptions(data, limit=limit),
        lambda: None,
        per_second=1 / task.seconds_each,
        deadline=Deadline(seconds, task.clock),
    )


def test_small_data_is_scored_once_and_whole(monkeypatch):
    task = Task(Clock(), total=5000, seconds_each=0.001)
    results, _ = scored(task, monkeypatch, seconds=300)
    assert task.limits == [10_000] and len(results[0].samples) == 5000
    generated = Task(Clock(), total=5000, seconds_each=0.001)
    results, asked = scored(generated, monkeypatch, seconds=300, data="shapes")
    assert generated.limits == [None] and asked.limit is None


def test_large_data_is_scored_until_the_intervals_are_narrow(monkeypatch):
    task = Task(Clock(), total=1_000_000, seconds_each=0.01)
    results, asked = scored(task, monkeypatch, seconds=3600)
    n = len(results[0].samples)
    assert asked.limit == n < 20_000 and task.limits[0] == 1000
    low, high = wilson(round(results[0].samples.sum()), n)
    assert (high - low) / 2 < 0.0101
    # The same samples as a longer run begins with, and each variant the same ones.
    assert np.array_equal(results[0].samples, answers(1_000_000, 0.6)[:n])
    assert len({len(result.samples) for result in results}) == 1


def test_slow_models_are_scored_until_the_time_is_over(monkeypatch):
    task = Task(Clock(), total=50_000, seconds_each=0.2)
    results, asked = scored(task, monkeypatch, seconds=150)
    assert task.clock.now < 1.1 * 150
    assert asked.limit == len(results[0].samples) and 256 < asked.limit < 700


def test_a_limit_is_not_exceeded(monkeypatch):
    task = Task(Clock(), total=50_000, seconds_each=0.001)
    results, asked = scored(task, monkeypatch, seconds=300, limit=300)
    assert task.limits == [300] and asked.limit == 300 == len(results[0].samples)


def test_a_draw_is_the_beginning_of_a_larger_one():
    small, large = drawn_rows(1000, 50), drawn_rows(1000, 400)
    assert small is not None and large is not None
    assert np.array_equal(small, large[:50]) and len({*large.tolist()}) == 400
    assert len({*(small // 100).tolist()}) > 5  # not only the first classes of a sorted file
    assert drawn_rows(1000, None) is None is drawn_rows(1000, 1000)


def test_rounds_in_process_end_when_they_suffice(monkeypatch):
    seen: list[int] = []

    def third(rates: dict[str, list[float]], _: float) -> bool:
        (rounds,) = rates.values()
        seen.append(len(rounds))
        return len(rounds) == 3

    monkeypatch.setattr(in_process, "rounds_suffice", third)
    one = SimpleNamespace(
        title="one", inputs={"image": np.zeros((3, 2))}, varied=False, run=lambda given: given
    )
    found = in_process.measure(
        {"one": one}, seconds=0.0, rounds=9, advance=lambda *_, **__: None, deadline=Deadline(100)
    )
    assert seen == [1, 2, 3] and len(found["one"].rounds) == 3


def test_the_expected_time_counts_slow_calls_and_windows():
    assert workload.inside_s(rate=1e6, window_s=0.05) == pytest.approx(7 * 0.05, rel=0.01)
    # 6 images/s: batches of 1, 2, 4 and 8, each with a call to warm up; larger ones are left out.
    assert workload.inside_s(rate=6, window_s=0.05) == pytest.approx(2 * 15 / 6)
    assert workload.served_s(6, (1, 16), 0.3) == pytest.approx(0.3 + 4 * (4 + 16) / 6 + 17 / 6)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({}, None),
        ({1: 6.3}, None),  # of one core: more may be faster
        ({1: 6.3, 2: 12.3}, None),  # all cores pay
        ({1: 100, 2: 99}, 1),
        ({1: 96, 2: 100}, 1),  # nearly as fast
        ({1: 100, 2: 180, 4: 190, 8: 185}, 4),
        ({1: 100, 2: 185, 4: 190, 8: 188}, 2),
    ],
)
def test_threads_that_are_enough(rates, expected):
    assert enough_threads(rates) == expected


def test_each_number_of_threads_is_measured_and_the_choice_is_opened(monkeypatch):
    monkeypatch.setattr(work, "cores", lambda: 6)
    cpu: Any = SimpleNamespace(gpu_only=False)
    assert work.counts(cpu, 6) == (6, 1, 2, 4)
    assert work.counts(cpu, 3) == (3, 1, 2, 4, 6)
    gpu: Any = SimpleNamespace(gpu_only=True)
    assert work.counts(gpu, 1) == (1,)
    threads = work.Threads(6, {("a", ""): {1: 90.0, 2: 100.0, 6: 99.0}, ("b", ""): {6: 5.0}})
    assert (threads.of(("a", "")), threads.of(("a", "text")), threads.of(("b", ""))) == (2, 2, 6)
    assert threads.rate(("a", "")) == 100.0

    opened: list[tuple[str, int]] = []

    def load(variant: Any, count: int) -> dict[str, Any]:
        opened.append((variant.name, count))
        return {"": f"with {count} threads"}

    manifest = SimpleNamespace()
    variants: list[Any] = [
        SimpleNamespace(name=name, main=manifest, components={"": manifest}) for name in "ab"
    ]
    shared: Any = {"": "with the share"}
    found = [work.OpenVariant(one, {}, shared, load).with_threads(threads) for one in variants]
    assert opened == [("a", 2)]
    assert [one.runners for one in found] == [{"": "with 2 threads"}, shared]


def test_windows_become_shorter_only_in_very_short_runs():
    options = BenchOptions(Path("report"))
    assert (options.seconds, options.window_s) == (300, 0.3)
    assert replace(options, seconds=0.1).window_s == pytest.approx(0.01)
    with pytest.raises(
        SaccadeError, match=r"--seconds: found 700000\.0, expected .* at most 604800"
    ):
        replace(options, seconds=700_000.0)
