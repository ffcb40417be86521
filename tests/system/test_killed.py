# SPDX-License-Identifier: Apache-2.0
"""Commands killed at a few moments each; many more of all of them: `make check-killed`."""

import json
import signal
import subprocess
import sys
from functools import partial

import pytest
from places import TESTS, module_at

pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[export]'")

CHECK = TESTS / "killed" / "check.py"


@pytest.fixture(scope="module")
def result():
    # A process of its own: this one has threads, which a fork would lose.
    words = ["--moments", "2", "--full", "2", "--commands", "convert", "repository", "--json"]
    done = subprocess.run(
        [sys.executable, CHECK, *words],
        capture_output=True,
        text=True,
        timeout=550,
        # As a shell starts what it puts into the background: Ctrl-C is tried all the same.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN),
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


@pytest.mark.journey
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM", "SIGINT", "ENOSPC"])
def test_nothing_half_made_is_seen_and_the_next_run_ends_well(result, fault):
    faulty = [each for each in result["results"] if each["fault"] == fault]
    assert [each["faults"] for each in faulty] == [[]] * len(faulty)
    assert sum(each["took_effect"] for each in faulty) >= len(faulty)


def test_counts_of_other_commands_stay_and_the_same_trials_go_on():
    counts = module_at(CHECK.with_name("counts.py"))
    train, export = (counts.Tally(name, "SIGKILL", 50, 6, 5) for name in ("train", "export"))
    before = counts.merged(counts.result_of([train], {"seed": 0}), counts.result_of([export], {}))
    assert [result["command"] for result in before["results"]] == ["train", "export"]
    assert not before["complete"]

    more = counts.Tally("train", "SIGKILL", 50)
    more.take(before, seed=0)
    assert (more.run, more.took_effect) == (6, 5)
    more.run = 50
    after = counts.merged(before, counts.result_of([more], {"seed": 0}))
    runs = [(result["command"], result["run"]) for result in after["results"]]
    assert runs == [("export", 6), ("train", 50)]
    missing = counts.with_missing(after, ["train", "export", "sweep"])
    assert missing["not_run"] == ["sweep"] and not missing["complete"]
    for other, seed in (
        (counts.Tally("train", "SIGKILL", 20), 0),
        (counts.Tally("train", "SIGKILL", 50), 1),
    ):
        other.take(before, seed=seed)
        assert other.run == 0, "trials at other moments are others"


def test_seconds_are_no_difference_and_anything_else_is(tmp_path):
    sys.path.insert(0, str(CHECK.parent))
    try:
        from trial import tree
    finally:
        sys.path.remove(str(CHECK.parent))

    def digests(seconds, value):
        (tmp_path / "m.json").write_text(json.dumps({"build_seconds": seconds, "n": value}))
        (tmp_path / "m.csv").write_text(f"step,seconds,loss\n1,{seconds},{value}\n")
        return tree(tmp_path)

    first = digests(0.2, 1)
    assert digests(1.5e-05, 1) == first
    other = digests(0.2, 2)
    assert all(other[name] != first[name] for name in ("m.json", "m.csv"))
