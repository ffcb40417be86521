# SPDX-License-Identifier: Apache-2.0
"""`saccade train`: train a family and write a checkpoint with its scores."""

import io
import json
import platform
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError, require
from saccade.core.files import json_bytes, new_folder, refuse_existing, sha256_of, write_together
from saccade.core.leftovers import only_writer, remove_leftovers
from saccade.core.machine import this_machine, version_of
from saccade.core.options import flag
from saccade.core.progress import Report, bar, reporting
from saccade.core.verbosity import note, verbosity
from saccade.core.worker import Worker
from saccade.models.checkpoint import Checkpoint, save
from saccade.models.checkpoint_folder import CARD
from saccade.models.checkpoint_format import GENERATED_DATA
from saccade.models.entry import imported
from saccade.models.families import config_class, entry_of
from saccade.models.training.options import TrainOptions, check_fields, overrides_words
from saccade.models.training.processes import (
    Group,
    ProcessLost,
    from_the_first,
    group_of,
    joined,
)
from saccade.models.training.recipe_file import recipe_text
from saccade.models.training.scalars import check_log_to, remove_logs
from saccade.models.training.task import Task

if TYPE_CHECKING:
    from saccade.models.training.loop import FitResult


# With scores rounded to these digits, the same run on the same machine gives the same file.
ABOUT_MINUTES = (1, 2, 3, 5, 7, 10, 15, 20, 30, 45, 60, 90, 120, 150, 200, 300, 500, 1000)
_PACKAGES = ("saccade", "torch", "numpy", "safetensors")


@dataclass(frozen=True)
class Follower:
    """The request to a worker: a family, the options as JSON, and its place in the group."""

    family: str
    options: str
    group: Group


def train(family: str, options: TrainOptions, *, progress: Report | None = bar) -> Checkpoint:
    """Train a model; write it with calibration samples and a card, and a log next to it.

    Under a launcher such as torchrun, processes other than the first exit when it is trained.

    Raises: SaccadeError if the family, an option, the data or the output path cannot be used, or
        if the loss is no longer finite.
    """
    _check(options)
    check_fields(config_class(family), options.set, entry_of(family).settings)
    group = group_of(options.processes)
    if group.rank:
        _follow(family, options, group)
        raise SystemExit
    with reporting(progress), only_writer(options.out):
        _forget_unfinished(options)
        _check_place(options)
        with joined(group, options.device, start=partial(_started, family, options)):
            trained = _trained(family, options, group)
    assert trained is not None, "the first process writes the checkpoint"
    return trained


def main(request: Follower) -> bool:
    """Take part in a run that another process started; return False if it ended too early."""
    given = json.loads(request.options)
    values: Any = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
    try:
        _follow(request.family, TrainOptions(**values), request.group)
    except ProcessLost:
        return False
    return True


def _started(family: str, options: TrainOptions, place: Group) -> Worker:
    """Start a process that takes part in a run."""
    worker = Worker(__name__)
    worker.send(Follower(family, json.dumps(vars(options), default=str), place))
    return worker


def _follow(family: str, options: TrainOptions, group: Group) -> None:
    """Take part in a run without writing or printing anything."""
    with verbosity(quiet=True), reporting(None), joined(group, options.device):
        _trained(family, options, group)


def _trained(family: str, options: TrainOptions, group: Group) -> Checkpoint | None:
    torch: Any = require("torch", extra="export")
    from saccade.models.training.start import started

    make = _task_of(family)
    options = started(family, options, partial(from_the_first, group))
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SaccadeError(
            "--device is cuda, but torch finds no GPU on this machine. Use --device cpu."
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    devices = [torch.cuda.current_device()] if options.device == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(options.seed)
            checkpoint = _run(make(options), options, group)
    except BaseException as error:
        if not options.state_path.exists() and not group.rank:
            _remove_logs(options)
        elif isinstance(error, KeyboardInterrupt):
            note("The state of the run is saved. To continue, run the same command with --resume.")
        raise
    finally:
        torch.set_num_threads(threads)
    if not group.rank:
        if options.is_folder:  # both are in it now
            options.log_path.unlink(missing_ok=True)
            _remove_logs(options)
        options.state_path.unlink(missing_ok=True)
    return checkpoint


def _run(task: Task, options: TrainOptions, group: Group) -> Checkpoint | None:
    from saccade.models.training.loop import fit
    from saccade.models.training.regularization import check_regularization
    from saccade.models.training.start import load_start

    check_shots(task, options)
    check_regularization(task, options)
    load_start(task, options)
    check_exportable(task)
    fitted = fit(task, options, group)
    if group.rank:
        return None
    finished = partial(_finished, task, options, fitted, group)
    if options.is_folder:
        return write_run(task, options, fitted, finished)
    return save(options.out, beside={fitted.log.path: fitted.log.content()}, **finished())


def _finished(
    task: Task, options: TrainOptions, fitted: "FitResult", group: Group
) -> dict[str, Any]:
    """Return the arguments of `save`, except places, for the weights that the model has."""
    import torch

    task.model.to(options.device)
    with torch.no_grad():
        task.finish()
        scores = task.report()
    task.model.cpu()
    saved = task.saved()
    begun = options.start or options.given_trunk
    if begun is not None and None not in (begun.preprocessing, saved["preprocessing"]):
        saved["preprocessing"] = begun.preprocessing
    return saved | {
        "family": task.family,
        "weights": task.model.state_dict(),
        "card": _card(task, options, fitted, scores, group),
    }


def check_shots(task: Task, options: TrainOptions) -> None:
    """Check that the task trains on the samples that `--shots` chooses.

    Raises: SaccadeError if its data has no classes, or is drawn again in each step.
    """
    if task.shots != options.shots:
        raise SaccadeError(
            f"--shots {options.shots}: {task.family} cannot choose samples by class from the data "
            f"'{task.data}': it draws new ones in each step, or they have no classes. Pass --data "
            "with images of classes, or leave --shots out."
        )


def check_exportable(task: Task) -> None:
    """Check that the checkpoint will have samples of every input, which an export requires.

    Raises: SaccadeError naming the inputs that the data lacks.
    """
    import torch

    samples = {name: array[:2] for name, array in task.calibration().items()}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for component in task.model.eval().components():
            if missing := component.missing(component.samples(samples)):
                raise SaccadeError(
                    f"the model takes {', '.join(missing)}, but the data '{task.data}' has only "
                    f"{', '.join(sorted(samples))}, so no export could check it. Change --set "
                    "input or --data."
                )


def _card(
    task: Task,
    options: TrainOptions,
    fitted: "FitResult",
    scores: dict[str, float],
    group: Group,
) -> dict[str, Any]:
    return {
        "data": task.data,
        "data_sha256": dict(task.data_sha256),
        **({"own_data": True} if _is_own(options.data) else {}),
        "seed": options.seed,
        "command": command_line(task.family, replace(options, processes=group.size), task.data),
        "recipe": options.recipe,
        "steps": task.recipe.steps,
        "batch": task.recipe.batch,
        "learning_rate": task.recipe.learning_rate,
        "best_step": fitted.best_step,
        "validation": scores,
        "device": _device(options),
        **({"processes": group.size} if group.size > 1 else {}),
        "about_minutes": min(ABOUT_MINUTES, key=lambda minutes: abs(minutes - fitted.seconds / 60)),
        "versions": {name: version_of(name) for name in _PACKAGES}
        | {"python": platform.python_version()},
    } | dict(task.card)


def _is_own(data: str | None) -> bool:
    """Return whether this is a path or a pattern, and not the name of generated data."""
    if data is None or data in GENERATED_DATA:
        return False
    return Path(data).exists() or bool(set("*?[{") & set(data))


def _device(options: TrainOptions) -> str:
    if options.device == "cpu":
        return f"cpu, {options.threads} thread{'s' if options.threads > 1 else ''}"
    import torch

    return f"cuda, {torch.cuda.get_device_name()}"


def _task_of(family: str) -> Callable[[TrainOptions], Task]:
    """Return the training task that the family's entry names."""
    make: Callable[[TrainOptions], Task] = imported(entry_of(family).training)
    return make


def _check(options: TrainOptions) -> None:
    out = options.out
    if out.suffix not in (".safetensors", ""):
        raise SaccadeError(
            f"--out is {out}, expected a name that ends in .safetensors, or one without an ending "
            "for a run folder."
        )
    check_log_to(options.log_to)
    if options.is_folder:
        require("matplotlib", extra="bench")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SaccadeError(
            f"{out}: cannot be written ({error}). Choose another path with --out."
        ) from error


def _forget_unfinished(options: TrainOptions) -> None:
    """Remove the log of a run that was killed before it wrote its checkpoint, which comes last."""
    out, state = options.out, options.state_path
    if remove_leftovers(out) and not (out.exists() or state.exists()):
        options.log_path.unlink(missing_ok=True)


def _check_place(options: TrainOptions) -> None:
    out = options.out
    given = (options.data, options.init, options.trunk, options.labels, options.data_root)
    inputs = [Path(path) for path in given if path is not None and options.is_folder]
    refuse_existing(out, force=options.force, inputs=inputs)
    if out.is_dir() and not options.is_folder:
        raise SaccadeError(f"--out is the folder {out}, expected a file. Choose a file name.")
    if options.resume:
        return
    if options.state_path.exists() and not options.force:
        raise SaccadeError(
            f"{options.state_path}: contains the state of an interrupted run. "
            "Continue it with --resume, or start again with --force."
        )
    refuse_existing(options.log_path, force=options.force)
    if options.log_to:
        refuse_existing(options.logs_path, force=options.force)
        _remove_logs(options)


def _remove_logs(options: TrainOptions) -> None:
    if options.log_to:
        remove_logs(options.logs_path)


# Options that say nothing about the result, or that are written first or last.
_NOT_REPEATED = ("out", "data", "seed", "threads", "log_to", "resume", "force")


def command_line(family: str, options: TrainOptions, data: str) -> str:
    """Return the command that repeats a training run, without this machine's folders."""
    words = ["saccade", "train", family, "--data", data, "--out", options.out.name]
    usual = TrainOptions(out=options.out)
    for name in (field.name for field in fields(TrainOptions)):
        value = getattr(options, name)
        if name not in _NOT_REPEATED and value != getattr(usual, name):
            words += [flag(name), *_words(name, value)]
    words += ["--seed", f"{options.seed}", "--threads", f"{options.threads}"]
    return shlex.join(words)


def _words(name: str, value: Any) -> list[str]:
    """Return the words that give an option this value; of paths only names, as with --data."""
    if name == "set":
        return overrides_words(value)
    if isinstance(value, Path):
        from saccade.models.training.start import start_name

        return [start_name(value) if name in ("init", "trunk") else value.name]
    if isinstance(value, tuple):
        return [",".join(map(str, value))]
    return [] if value is True else [f"{value}"]


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
        write_together({folder / RUN: json_bytes(_run_facts(task, fitted, best, last, folder))})
    return replace(checkpoint, path=options.out / checkpoint.path.name)


def _run_facts(
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
