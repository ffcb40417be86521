# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: both checkpoints, and everything that repeats it.

`model.safetensors` is the best checkpoint, with `config.json` and a card, so the folder is a
checkpoint itself. `last.safetensors` is the one of the last step. `recipe.toml` has the options,
`run.json` the versions, hashes and scores, `log.csv` the log and `curves.png` its picture; `logs`
has the files of `--log-to`.
"""

import io
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.errors import require
from saccade.core.files import json_bytes, new_folder, sha256_of, write_together
from saccade.core.machine import this_machine
from saccade.models.checkpoint import Checkpoint, save
from saccade.models.checkpoint_folder import CARD
from saccade.models.training.options import TrainOptions
from saccade.models.training.recipe_file import recipe_text
from saccade.models.training.task import Task

if TYPE_CHECKING:
    from saccade.models.training.loop import FitResult

LAST, RECIPE, RUN, LOG, CURVES, LOGS = (
    "last.safetensors", "recipe.toml", "run.json", "log.csv", "curves.png", "logs",
)  # fmt: skip
_RESOLVED = ("steps", "batch", "learning_rate")  # left to the family's recipe by default
Saved = Callable[[], dict[str, Any]]
_REPEAT = """
This folder is a training run. `last.safetensors` is the checkpoint of the last step, `log.csv` the
log, `curves.png` its picture, and `run.json` has the versions, hashes and scores. To repeat it:

```sh
saccade train --recipe-file {0}/recipe.toml --out {0}-again
```
"""


def write_run(task: Task, options: TrainOptions, fitted: "FitResult", saved: Saved) -> Checkpoint:
    """Write the folder in one step and return its best checkpoint.

    `saved` returns the arguments of `checkpoint.save` for the weights that the model has.

    Raises: SaccadeError if the folder cannot be written, MissingPackage without matplotlib.
    """
    with new_folder(options.out, force=options.force) as folder:
        best = saved()
        checkpoint = save(folder, called=options.out.name, **best)
        task.model.load_state_dict(fitted.last_weights)
        last = saved()
        last["card"] |= {"weights_of_step": task.recipe.steps}
        save(folder / LAST, **last)
        text = recipe_text(
            task.family, options, {name: getattr(task.recipe, name) for name in _RESOLVED}
        )
        log = fitted.log
        card = (folder / CARD).read_text(encoding="utf-8") + _REPEAT.format(options.out.name)
        title = f"{options.out.name}: {task.family} on {task.data}"
        write_together(
            {
                folder / RECIPE: text.encode(),
                folder / CARD: card.encode(),
                folder / LOG: log.content(),
                folder / CURVES: curves_png(log.rows, fitted.best_step, title),
            }
        )
        if options.log_to and options.logs_path.is_dir():
            # Links stay links: W&B links its latest run.
            shutil.copytree(options.logs_path, folder / LOGS, symlinks=True)
        write_together({folder / RUN: json_bytes(_run(task, fitted, best, last, folder))})
    return replace(checkpoint, path=options.out / checkpoint.path.name)


def _run(
    task: Task,
    fitted: "FitResult",
    best: Mapping[str, Any],
    last: Mapping[str, Any],
    folder: Path,
) -> dict[str, Any]:
    machine = this_machine().to_dict()
    files = sorted(path for path in folder.iterdir() if path.is_file())
    recipe = {key: value for key, value in asdict(task.recipe).items() if key != "extra"}
    return best["card"] | {
        "family": task.family,
        "configuration": best["config"],
        "recipe_values": recipe,
        "recipe_extra": {key: _plain(value) for key, value in task.recipe.extra.items()},
        "validation_last": last["card"]["validation"],
        "seconds": round(fitted.seconds, 1),
        "machine": {key: machine[key] for key in ("processor", "cores", "memory_mib", "system")},
        "versions": {**best["card"]["versions"], **machine["versions"]},
        "files": {path.name: sha256_of(path) for path in files},
    }


def _plain(value: Any) -> Any:
    """Return a value of JSON, or the description of another one, such as an augmentation."""
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


_LOSS, _RATE, _BEST, _GRID = "#0b6e99", "#8a8f98", "#c2571a", "#e3e6ea"
_BESIDE = ("step", "loss", "learning_rate", "seconds")


def curves_png(rows: Sequence[Mapping[str, float]], best_step: int, title: str) -> bytes:
    """Draw a log: the loss with the learning rate, and below it the validation scores.

    Raises: MissingPackage without matplotlib.
    """
    matplotlib: Any = require("matplotlib", extra="bench")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    # Names are plain text: matplotlib would read text between two dollar signs as a formula.
    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(8.0, 6.4), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subplots(2, 1, sharex=True)
        _draw_loss(above, rows)
        _draw_scores(below, rows)
        for axes in (above, below):
            axes.grid(color=_GRID)
            axes.spines[["top", "right"]].set_visible(False)
            axes.axvline(best_step, color=_BEST, linewidth=1.5, linestyle=":")
        below.xaxis.get_major_locator().set_params(integer=True)
        below.set_xlabel(f"step (dotted: the best, {best_step:,})")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
        # Without a version, the same log gives the same bytes.
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_loss(axes: Any, rows: Sequence[Mapping[str, float]]) -> None:
    steps = [row["step"] for row in rows]
    marker = "o" if len(rows) == 1 else ""
    axes.plot(steps, [row["loss"] for row in rows], color=_LOSS, marker=marker)
    axes.set_ylabel("training loss", color=_LOSS)
    rate = axes.twinx()
    rate.plot(steps, [row["learning_rate"] for row in rows], color=_RATE, linewidth=1)
    rate.set_ylabel("learning rate", color=_RATE)
    rate.set_ylim(bottom=0)
    rate.spines[["top"]].set_visible(False)


def _draw_scores(axes: Any, rows: Sequence[Mapping[str, float]]) -> None:
    names = dict.fromkeys(name for row in rows for name in row if name not in _BESIDE)
    for name in names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set_ylabel("validation")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
