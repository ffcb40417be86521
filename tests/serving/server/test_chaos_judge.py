# SPDX-License-Identifier: Apache-2.0
"""The judge of faults finds what it is for, and the page says what table and results say."""

import json
from collections import Counter

import pytest
from chaos import page
from chaos.callers import Call
from chaos.faults import FAULTS
from chaos.file_tables import fuzzed, killed
from chaos.judge import Observation, judge
from chaos.soak import Sample, Soaked, judge_soak
from chaos.table import ROWS, Notice, Row, rows

ROW = Row(
    "x", "kill_variant", "something", "cheap", Notice(frozenset({"UNAVAILABLE"}), 8),
    Notice(p99_times=2.0), hears=frozenset({"OK"}), memory_mib=10,
)  # fmt: skip


def calls(*failures: tuple[float, str], wait_s: float = 0.03) -> list[Call]:
    """Calls every tenth of a second for 20 s; the fault comes at 10 s."""
    good = [Call(at / 10 - wait_s, at / 10, "OK") for at in range(200)]
    return good + [Call(at - 0.1, at, status) for at, status in failures]


def seen(**changes) -> Observation:
    given = {
        "start_s": 3.0, "began": 10.0, "ended": 10.0, "recovered_s": 2.0,
        "calls": {"callers": calls((12.0, "UNAVAILABLE")), "others": calls()},
        "heard": Counter({"OK": 3}), "memory_mib": (100.0, 500.0, 105.0),
    }  # fmt: skip
    return Observation(**(given | changes))


def failed(observation: Observation, **named) -> list[str]:
    return [check.what for check in judge(ROW, observation, **named) if not check.passed]


def test_what_is_allowed_passes():
    assert failed(seen()) == []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"calls": {"callers": calls((12.0, "INTERNAL"))}}, "callers hear"),
        ({"calls": {"callers": calls((19.5, "UNAVAILABLE"))}}, "callers notice it for"),
        ({"calls": {"others": calls((12.0, "UNAVAILABLE"))}}, "others hear"),
        ({"calls": {"others": calls(*[(11 + at / 9, "OK") for at in range(40)], wait_s=0.01)}},
         "others wait (p99)"),
        ({"heard": Counter({"INTERNAL": 1})}, "the fault's own requests hear"),
        ({"checks": [("the changed code did not run", False)]}, "the changed code did not run"),
        ({"servers": 1}, "further processes of the server"),
        ({"recovered_s": None}, "full service again"),
        ({"leftovers": ["process stub"]}, "left at the end"),
        ({"memory_mib": (100.0, 500.0, 111.0)}, "memory more than before"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_judge_finds(changes, what):
    assert failed(seen(**changes)) == [what]


def test_failures_before_the_fault_do_not_count():
    assert failed(seen(calls={"others": calls((9.0, "INTERNAL"))})) == []


def test_without_seconds_only_mechanisms_count():
    slow = seen(calls={"callers": calls((19.5, "UNAVAILABLE"))}, memory_mib=(0.0, 0.0, 99.0))
    assert failed(slow, strict=False) == []
    assert failed(seen(servers=1), strict=False) == ["further processes of the server"]


def soaked(bytes_a_request: float, *, requests: int = 100_000, **changes) -> Soaked:
    samples = [
        Sample(done, {"server": 200 + done * bytes_a_request / 2**20}, 50)
        for done in range(0, requests, requests // 30)
    ]
    given = {"failed": {}, "restarts": 0, "leftovers": [], "samples": tuple(samples)}
    return Soaked(requests=requests, seconds=1.0, **(given | changes))


@pytest.mark.parametrize(
    ("verdict", "wrong"),
    [
        (soaked(0), []),
        (soaked(32, requests=1_000_000), []),
        (soaked(1024), ["memory grows"]),
        (soaked(128, requests=1_000_000), ["memory grows"]),
        (soaked(0, failed={"INTERNAL": 1}), ["requests fail"]),
        (soaked(0, restarts=1), ["restarts"]),
    ],
)
def test_the_soak_is_judged(verdict, wrong):
    assert [check.what for check in judge_soak(verdict) if not check.passed] == wrong


def test_every_row_has_a_fault_and_every_fault_a_row():
    assert {row.fault for row in ROWS} == set(FAULTS)
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert 2 <= len(rows(short=True)) <= 5
    with pytest.raises(KeyError):
        rows(("no-such-row",))


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.name)
def test_the_page_is_what_table_and_results_say(path):
    text = path.read_text()
    assert page.filled(text, names=page.PAGES[path]) == text, "run: make check-chaos CHAOS=page"


def test_the_page_shows_what_was_not_as_wanted(tmp_path):
    check = {"what": "others hear", "wanted": "answers only", "found": "3 NOT_FOUND"}
    tries = [
        {"passed": False, "checks": [check | {"passed": False}], "callers": {}},
        {"passed": True, "checks": [], "callers": {"callers": {"outage_s": 4.21}}},
    ]
    content = {"rows": {"variant-killed": {"tries": tries}}}
    (tmp_path / "chaos.json").write_text(json.dumps(content))
    text = page.filled(page.PAGE.read_text(), tmp_path)
    assert "**as expected 1 of 2 times** (others got: 3 NOT_FOUND), 4.2 s" in text
    assert page.UNMEASURED in text


def test_the_page_shows_what_was_cut_short_or_wrong():
    fault = {"wrong": ["m.csv is visible"]}
    tallies = [
        {"command": "train", "fault": name, "planned": 50, "run": run, "took_effect": 9,
         "faults": wrong}
        for name, run, wrong in (("SIGKILL", 50, []), ("SIGINT", 12, [fault]))
    ]  # fmt: skip
    runs = {"train": {"full_disk": "none"}}
    text = killed({"results": tallies, "runs": runs, "not_run": ["sweep"]})
    assert "| `sweep` | 0 | 0 | 0 | 0 | not run yet |" in text
    assert "| `train` | 50 | - | 12 of 50 | - | **in 1** (m.csv is visible) |" in text
    assert "Of 100 planned trials, 62 were run, and 18 took effect" in text


def test_the_page_says_which_readers_had_fewer_files():
    one = {"examples": 100_000, "slowest_seconds": 0.2, "largest_mib": 300}
    few = {"examples": 7, "failed": 2, "slowest_seconds": 4.0, "largest_mib": 900}
    text = fuzzed({"readers": {"--set": one, "checkpoint": few}}, {"kinds": {"graph": one}})
    assert "2 kinds: 100,007 files, 2 stack traces. The slowest file took 4.0 s" in text
    assert "used 900 MiB. Kinds with fewer than 100,000 files: checkpoint 7." in text
    assert "used 300 MiB. Kinds with fewer than 100,000 files: none." in text
