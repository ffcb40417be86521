# SPDX-License-Identifier: Apache-2.0
"""`--log-to`: what reaches TensorBoard and W&B by step, resumed runs, missing packages.

Both packages are stubs that record what they are given.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.models.runs import few_images, interrupted

from saccade.core.errors import MissingPackage, SaccadeError
from saccade.models.training import train as train_module
from saccade.models.training.scalars import Scalars, check_log_to
from saccade.models.training.train import TrainOptions, train

MODEL = {"modules": 2, "dim": 8, "propagator_layers": 1, "heads": 2, "ffn_dim": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return few_images(tmp_path_factory.mktemp("data"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What both programs are told, in order."""
    told: list[Any] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            told.append(("open", Path(folder).name, purge_step))
            Path(folder).mkdir(exist_ok=True)
            (Path(folder) / f"events.out.tfevents.{len(told)}").touch()

        def add_scalar(self, name: str, value: float, step: int) -> None:
            told.append((name, value, step))

        def flush(self) -> None:
            told.append("flush")

        def close(self) -> None:
            told.append("close")

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            told.append(("wandb", dict(values), step))

        def finish(self) -> None:
            told.append("finish")

    def init(**given: Any) -> Run:
        told.append(("init", given))
        folder = Path(given["dir"]) / "wandb"
        folder.mkdir(exist_ok=True)
        if not (folder / "latest-run").is_symlink():
            (folder / "latest-run").symlink_to("offline-run-1")
        return Run()

    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    wandb = ModuleType("wandb")
    wandb.init, wandb.Settings = init, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return told


def test_every_row_is_logged_and_a_resumed_run_continues(
    calls: list[Any], data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TrainOptions(
        tmp_path / "run", data=data, shots=2, steps=5, set=MODEL,
        log_to=("tensorboard", "wandb"),
    )  # fmt: skip
    with interrupted(3):
        train("nac", options)
    assert (tmp_path / "run.logs" / "events.out.tfevents.1").exists()
    assert calls[-2:] == ["close", "finish"]
    monkeypatch.setattr(train_module, "curves_png", lambda *_: b"")
    train("nac", replace(options, resume=True))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert (tmp_path / "run" / "logs" / "wandb" / "latest-run").is_symlink()
    opened = [call for call in calls if call[0] == "open"]
    assert opened == [("open", "run.logs", None), ("open", "run.logs", 4)]
    first, again = (call[1] for call in calls if call[0] == "init")
    assert first["mode"] == again["mode"] == "offline" and first["resume"] is None
    assert first["id"] == again["id"] and len(first["id"]) == 8
    assert first["config"]["family"] == "nac" and first["settings"].disable_code
    assert first["settings"].x_save_requirements is False
    losses = [call for call in calls if call[0] == "train/loss"]
    assert [step for _, _, step in losses] == [1, 2, 3, 4, 5]
    rows = (tmp_path / "run" / "log.csv").read_text().splitlines()[1:]
    assert [f"{value:.10g}" for _, value, _ in losses] == [row.split(",")[1] for row in rows]
    sent = [call for call in calls if call[0] == "wandb"]
    assert [step for _, _, step in sent] == [1, 2, 3, 4, 5]
    names = {"train/loss", "train/learning_rate", "validation/mean", "validation/1"}
    assert names <= set(sent[-1][1])


def test_a_run_that_fails_at_once_leaves_no_logs_and_old_ones_are_kept(
    calls: list[Any], data: str, tmp_path: Path
) -> None:
    options = TrainOptions(
        tmp_path / "a.safetensors", data=data, shots=2, steps=3, set=MODEL,
        log_to=("tensorboard",), learning_rate=1e30,
    )  # fmt: skip
    with pytest.raises(SaccadeError, match="loss is"):
        train("nac", options)
    assert not list(tmp_path.iterdir()) and calls[-1] == "close"
    logs = tmp_path / "a.logs"
    logs.mkdir()
    (logs / "events.out.tfevents.0").touch()
    (logs / "mine.txt").touch()
    with pytest.raises(SaccadeError, match=r"a\.logs: exists already"):
        train("nac", options)
    assert len(list(logs.iterdir())) == 2
    with pytest.raises(SaccadeError, match="loss is"):
        train("nac", replace(options, force=True))
    assert [path.name for path in logs.iterdir()] == ["mine.txt"]


def test_only_wandb_online_sends_anything(calls: list[Any], tmp_path: Path) -> None:
    for name, mode in (("wandb", "offline"), ("wandb-online", "online")):
        scalars = Scalars(TrainOptions(tmp_path / "a.safetensors"), (name,), {})
        scalars.restore({"id": "abc"}, 7)
        with scalars:
            scalars.add({"step": 8, "loss": 1.0, "learning_rate": 0.1}, {})
        given = calls[0][1]
        assert (given["mode"], given["id"]) == (mode, "abc")
        assert given["resume"] == ("allow" if mode == "online" else None)
        calls.clear()


WRONG = {
    ("tensorbord",): "Did you mean tensorboard",
    ("wandb", "wandb-online"): "expected one of them",
    ("wandb", "wandb"): "has wandb twice",
}


@pytest.mark.parametrize("names", WRONG)
def test_refuses(names: tuple[str, ...], calls: list[Any], tmp_path: Path) -> None:
    with pytest.raises(SaccadeError, match=WRONG[names]):
        train("nac", TrainOptions(tmp_path / "a.safetensors", log_to=names))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingPackage, match=rf"\S+\[{name}\]"):
        check_log_to((name,))
