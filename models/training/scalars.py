# SPDX-License-Identifier: Apache-2.0
"""Losses, learning rates and validation scores by step, for TensorBoard and Weights & Biases."""

import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from saccade.core.checks import check_once, check_one_of
from saccade.core.errors import SaccadeError, require
from saccade.models.training.options import TrainOptions


class Writer(Protocol):
    """A program's log of one session of a run."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step."""

    def close(self) -> None:
        """Write what is left."""


class _TensorBoard:
    """Event files, which TensorBoard reads while they grow."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Rows that a killed session wrote after its last saved state are hidden.
        purge = resumed_at + 1 if resumed_at else None
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases: files to send with `wandb sync`, or, online, sent immediately."""

    def __init__(
        self, folder: Path, name: str, identifier: str, resumed_at: int, facts: Any, *, online: bool
    ) -> None:
        wandb: Any = require("wandb", extra="wandb")
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project="saccade",
            name=name,
            id=identifier,
            dir=str(folder),
            config=facts,
            # Given, so that no variable of the environment can send what nobody asked to send.
            mode="online" if online else "offline",
            resume="allow" if resumed_at and online else None,
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, save_code=False,
                x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
            ),
        )  # fmt: skip

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


# The module that each name of `--log-to` needs; the extra has the module's name.
_NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb", "wandb-online": "wandb"}


def check_log_to(names: Sequence[str]) -> None:
    """Check the names of `--log-to`, and that the packages are there, before any work.

    Raises: SaccadeError for an unknown name or both kinds of W&B, MissingPackage for a package.
    """
    for name in names:
        check_one_of("--log-to", name, _NEEDS)
    check_once("--log-to", names)
    if {"wandb", "wandb-online"} <= {*names}:
        raise SaccadeError(
            "--log-to: found wandb and wandb-online, expected one of them. wandb writes files only."
        )
    for name in names:
        require(_NEEDS[name], extra=_NEEDS[name])


def remove_logs(folder: Path) -> None:
    """Remove the logs of an earlier run; other files in the folder stay."""
    for path in folder.glob("events.out.tfevents.*"):
        path.unlink()
    shutil.rmtree(folder / "wandb", ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()


class Scalars:
    """The logs of `--log-to`; nothing is opened before the first row."""

    def __init__(
        self, options: TrainOptions, names: Sequence[str], facts: Mapping[str, Any]
    ) -> None:
        self._options, self._names, self._facts = options, names, facts
        self._writers: list[Writer] | None = None
        self._resumed_at = 0
        self._id = ""

    def __enter__(self) -> "Scalars":
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers or ():
            writer.close()
        self._writers = None

    def add(self, row: Mapping[str, float], scores: Mapping[str, float]) -> None:
        """Add a row of the log, with the scores if its step was validated."""
        if self._writers is None:
            self._writers = [self._opened(name) for name in self._names]
        values = {f"train/{name}": row[name] for name in ("loss", "learning_rate")}
        values |= {f"validation/{name}": score for name, score in scores.items()}
        for writer in self._writers:
            writer.add(int(row["step"]), values)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue the same logs."""
        return {"id": self._id}

    def restore(self, state: Mapping[str, Any], done: int) -> None:
        """Continue the logs of the run whose `state` this is, after `done` steps."""
        self._id, self._resumed_at = str(state.get("id", "")), done

    def _opened(self, name: str) -> Writer:
        folder = self._options.logs_path
        if _NEEDS[name] == name == "tensorboard":
            return _TensorBoard(folder, self._resumed_at)
        self._id = self._id or secrets.token_hex(4)
        run = self._options.out.stem
        online = name != _NEEDS[name]
        return _Wandb(folder, run, self._id, self._resumed_at, self._facts, online=online)
