# SPDX-License-Identifier: Apache-2.0
"""Two processes, micro-batches and recomputed layers give what one pass over the batch gives.

Noise is not compared: each process and each micro-batch draws its own.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import part_runs
import pytest
import torch
from part_runs import BROKEN, CASES, SHARED, difference, run
from places import ROOT

from saccade.core.errors import SaccadeError
from saccade.core.worker import Worker
from saccade.models.checkpoint import load
from saccade.models.training import parts
from saccade.models.training import train as training
from saccade.models.training.options import TrainOptions
from saccade.models.training.processes import Group, group_of, joined
from saccade.models.training.train import Follower, train
from saccade.serving.commands import cli

CLOSE = 1e-6
NOISY = ("nac, noisy", "nac, resumed", "noise")
UNUSED = TrainOptions(Path("unused.safetensors"))
TWO = Group(size=2)
WEIGHTS = {"modules": 8, "dim": 16, "propagator_layers": 1, "kernel_draw": "none"}


@pytest.fixture(scope="module")
def second() -> Iterator[Worker]:
    """The second process of all tests here: to import torch takes longer than all they do."""
    # The sources as well: the mutated ones are not where this environment's are.
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    with Worker("part_runs", environment={"PYTHONPATH": paths}) as worker:
        yield worker


@pytest.fixture(scope="module")
def as_second(second: Worker) -> Iterator[Worker]:
    """The process that --processes would start, ready for one run after the other."""

    with patch.object(training, "_started", partial(started, second)):
        yield second


def started(second: Worker, what: str, options: TrainOptions, place: Group) -> Any:
    """Let the second process take that place in a group; it ends with the module."""
    second.send(Follower(what, json.dumps(vars(options), default=str), place))
    return nullcontext(second)


@pytest.fixture(scope="module")
def one() -> dict[str, dict[str, np.ndarray]]:
    """The runs of one process."""
    return {name: run(name) for name in CASES}


@pytest.fixture(scope="module")
def two(as_second: Worker) -> dict[str, dict[str, np.ndarray]]:
    """The runs of two processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with joined(TWO, "cpu", start=partial(started, as_second, "shared", UNUSED)) as group:
        found = part_runs.shared(group)
    torch.set_num_threads(threads)
    assert as_second.answer(bool)
    return found


@pytest.mark.parametrize("name", [name for name in SHARED if name not in NOISY])
def test_two_processes_give_what_one_gives(name: str, one: Any, two: Any) -> None:
    case = next(case for case in sorted(CASES, key=len, reverse=True) if name.startswith(case))
    if name == "sot in bfloat16":
        alone = run(case, kind=torch.float32, precision="bf16")
        assert 0 < difference(alone, two[name]) < 1e-2
        return
    assert difference(one[case], two[name]) < CLOSE


@pytest.mark.parametrize("name", BROKEN)
def test_the_comparison_notices_when(name: str, one: Any, two: Any) -> None:
    assert difference(one[BROKEN[name][0]], two[name]) > 100 * CLOSE


def test_a_resumed_run_of_two_processes_has_the_bits_of_an_uninterrupted_one(two: Any) -> None:
    assert difference(two["nac, noisy"], two["nac, resumed"]) == 0


def test_each_process_draws_noise_of_its_own(two: Any) -> None:
    assert len(set(two["noise"]["drawn"].tolist())) == 2


@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].has_norms])
def test_micro_batches_of_recomputed_layers_give_what_one_batch_gives(name: str, one: Any) -> None:
    found = run(name, accumulate=3, checkpoint_activations=CASES[name].has_blocks)
    assert difference(one[name], found) < CLOSE


@pytest.mark.parametrize("name", ["nac", "vqa"])
def test_recomputed_layers_give_the_same_bits(name: str) -> None:
    one = run(name, noisy=True)
    assert difference(one, run(name, noisy=True, checkpoint_activations=True)) == 0


def test_train_starts_a_second_process_and_writes_one_checkpoint(
    as_second: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TrainOptions(tmp_path / "one.safetensors", data="digits", set=WEIGHTS, steps=3)
    alone = train("nac", options)
    both = replace(options, out=tmp_path / "two.safetensors", processes=2)
    start = training._started
    with monkeypatch.context() as patched:
        patched.setattr(training, "_started", lambda name, *rest: start(f"train: {name}", *rest))
        trained = train("nac", both)
    assert as_second.answer(bool)
    for name, value in alone.weights.items():
        torch.testing.assert_close(trained.weights[name], value, rtol=1e-3, atol=1e-4)
    assert load(both.out).card["processes"] == 2
    assert "own_data" not in trained.card, "digits are generated"
    assert "--processes 2" in trained.card["command"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("one.csv", "one.safetensors", "two.csv", "two.safetensors")
    ]


@pytest.mark.parametrize(
    ("rate", "code", "message"),
    [("1e-3", 0, "trained on digits"), ("1e30", 2, "expected a finite number")],
)
def test_processes_of_a_launcher_print_once(
    rate: str,
    code: int,
    message: str,
    second: Worker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "nac.safetensors"
    words = ["train", "nac", "--data", "digits", "--steps", "4", "--out", str(out)]
    words += ["--learning-rate", rate, "--set", "modules=8", "dim=16"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    second.send(Follower("launched: ", json.dumps([words, port, code]), TWO))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", port)
    try:
        found = cli.run(words)
    except SystemExit as end:  # the other one was first
        found = int(str(end.code))
    assert found == code
    theirs = second.answer(str)
    written = capsys.readouterr()
    assert (written.out + written.err + theirs).count(message) == 1
    assert not (theirs and written.err), "one of them prints"
    assert out.exists() == (not code)


def test_a_launcher_and_processes_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert group_of(1) == Group(1, 4, launched=True)
    with pytest.raises(SaccadeError, match=r"found 4 processes of a launcher"):
        group_of(2)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("fails", r"row 12,345: found no image\."),
        ("dies", r"lost process 2 of 2 \(killed by SIGKILL\).* lower --processes"),
    ],
)
def test_the_error_of_another_process_is_the_only_one(
    what: str, message: str, as_second: Worker
) -> None:
    start = partial(started, as_second, what, UNUSED)
    with pytest.raises(SaccadeError, match=message), joined(TWO, "cpu", start=start) as group:
        parts.all_sum(group, torch.ones(1))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("captioner", {"accumulate": 2}, "found the batch norm 'convolutions.1'"),
        ("captioner", {"checkpoint_activations": True}, "found no repeated blocks"),
        ("sot", {"accumulate": 7}, "found a batch of 6 samples, expected at least 7"),
    ],
)
def test_refuses_what_parts_cannot_do(name: str, changes: Any, message: str) -> None:
    with pytest.raises(SaccadeError, match=message):
        run(name, **changes)
