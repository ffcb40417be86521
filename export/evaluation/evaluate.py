# SPDX-License-Identifier: Apache-2.0
"""Score a checkpoint, or every variant of an exported folder, on data."""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.core.files import write_atomically
from saccade.core.machine import cores
from saccade.core.progress import Report, bar, progress_of, reporting
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.variant import check_budgets
from saccade.exporter.evaluation.evaluated_model import (
    EvaluatedModel,
    subjects_of_checkpoint,
    subjects_of_folder,
    trained_on,
)
from saccade.exporter.evaluation.tasks import EvaluateOptions, task_asked
from saccade.exporter.runtimes.runtime import runtime_named
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.checkpoint_folder import checkpoint_file
from saccade.models.data.options import loaded_once
from saccade.models.entry import imported
from saccade.models.scores.results import EvaluationResult, Score

_MOST_ROWS, _MOST_OTHERS = 10, 3  # in a table for a terminal

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Evaluation:
    """The evaluation results of each variant."""

    path: Path
    results: tuple[EvaluationResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"path": str(self.path), "found": [result.to_dict() for result in self.results]}

    def to_text(self) -> Any:
        """Return a table with a row per score, for a terminal, then the scores of classes."""
        from rich.console import Group

        classes = [_classes(one) for one in self.results if one.answers is not None]
        return Group(render(self.results), *classes) if classes else render(self.results)


def evaluate(
    path: ArtefactFolder | Path | str,
    options: EvaluateOptions,
    *,
    progress: Report | None = bar,
) -> Evaluation:
    """Score a checkpoint, or every variant in an artefact folder.

    If no data is given, the data in the checkpoint's card is used, or else the task's default.

    Raises: SaccadeError if there is neither, or if the task or data do not fit the family.
    """
    if options.mistakes is not None and options.mistakes.exists():
        raise SaccadeError(
            f"--mistakes {options.mistakes}: exists already. Pass another path, or remove the file."
        )
    with reporting(progress):
        evaluation = _evaluated(path, options)
    if options.mistakes is not None:
        write_atomically(options.mistakes, _mistakes(evaluation.results), replace=False)
    return evaluation


def _mistakes(results: Sequence[EvaluationResult]) -> bytes:
    """Return a table in CSV with a row per wrong answer of each variant."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("variant", "sample", "label", "answer"))
    for result in results:
        table.writerows((result.variant, *row) for row in result.answers.mistakes())
    return text.getvalue().encode()


def _evaluated(path: ArtefactFolder | Path | str, options: EvaluateOptions) -> Evaluation:
    if isinstance(path, ArtefactFolder) or checkpoint_file(path).is_dir():
        folder, runtime = ArtefactFolder.open(path), runtime_named(options.runtime)
        runtime.require()
        models = subjects_of_folder(folder, runtime, kernels=options.op_library, threads=cores())
        results = scores_of(models, options, lambda: folder.checkpoint)
        return Evaluation(folder.path, results)
    checkpoint = load(path, check=partial(check_budgets, given=options.budget))
    models = subjects_of_checkpoint(checkpoint, options.budget)
    return Evaluation(checkpoint.path, scores_of(models, options, lambda: checkpoint))


def scores_of(
    models: Sequence[EvaluatedModel],
    options: EvaluateOptions,
    checkpoint: Callable[[], Checkpoint | None],
) -> tuple[EvaluationResult, ...]:
    """Run the task for each model, on the user's data loaded once for all of them.

    The checkpoint is read only if no data is given.

    Raises: SaccadeError if the task or data do not fit the family.
    """
    if options.data is None:
        options = replace(options, data=trained_on(checkpoint()))
    results = []
    with progress_of("evaluate", len(models)) as advance, loaded_once():
        for model in models:
            advance(0, note=model.name)
            results.append(replace(_task(model, options)(model, options), ops=model.ops))
            advance()
    return tuple(results)


def _task(
    model: EvaluatedModel, options: EvaluateOptions
) -> Callable[[EvaluatedModel, EvaluateOptions], EvaluationResult]:
    name, chosen = task_asked(model.family, options.task, model.name, model.components)
    if options.positions != "anywhere" and name != "ari":
        raise SaccadeError(
            f"--positions {options.positions}: only the task ari supports this option, not "
            f"'{name}'. Leave it out."
        )
    if options.probe != "logistic" and name != "probe":
        raise SaccadeError(
            f"--probe {options.probe}: only the task probe supports this option, not '{name}'. Add "
            "--task probe, or leave it out."
        )
    if (options.by_class or options.mistakes) and name != "top1":
        raise SaccadeError(
            f"--{'by-class' if options.by_class else 'mistakes'}: only the task top1 supports this "
            f"option, not '{name}'. Leave it out."
        )
    task: Callable[[EvaluatedModel, EvaluateOptions], EvaluationResult] = imported(chosen.score)
    return task


def render(results: Sequence[EvaluationResult]) -> "Table":
    """Return a table with a row per score of each variant, with its 95 % interval."""
    from rich import box
    from rich.table import Table

    first = results[0]
    how = f" ({first.protocol})" if first.protocol else ""
    ops = next((result.ops for result in results if result.ops), None)
    notes = [f"Custom ops by {ops}."] if ops else []
    if first.skipped:
        rows = "row" if first.skipped == 1 else "rows"
        notes.append(f"{first.skipped} unreadable {rows} left out.")
    note = " ".join(notes) or None
    split = f", split {first.split}" if first.split else ""
    title = f"{first.task} on {first.data}{split}{how}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1), caption=note, caption_justify="left")
    table.add_column("variant", no_wrap=True)
    table.add_column("score")
    for heading in ("value", "95 %", "n"):
        table.add_column(heading, justify="right")
    for result in results:
        for index, score in enumerate(result.scores):
            name = result.variant if index == 0 else ""
            table.add_row(name, score.name, *_figures(score), str(score.n))
    return table


def _classes(result: EvaluationResult) -> "Table":
    """Return a table of the classes with the lowest scores of a variant."""
    from rich import box
    from rich.table import Table

    classes = result.answers.classes()
    title = f"{result.variant}, by class"
    if len(classes) > _MOST_ROWS:
        title += f": the lowest {_MOST_ROWS} of {len(classes):,} (--json has all)"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1))
    table.add_column("class")
    for heading in ("value", "95 %", "n"):
        table.add_column(heading, justify="right")
    table.add_column("taken for")
    for one in classes[:_MOST_ROWS]:
        score = Score("", one["value"], one["interval"], one["n"])
        taken = [f"{name} ({count})" for name, count in one["taken_for"].items()]
        shown = ", ".join(taken[:_MOST_OTHERS]) + ", ..." * (len(taken) > _MOST_OTHERS)
        table.add_row(one["class"], *_figures(score), str(one["n"]), shown)
    return table


def _figures(score: Score) -> tuple[str, str]:
    interval = "-"
    if score.unit == "share":
        if score.interval is not None:
            interval = " to ".join(f"{100 * bound:.1f}" for bound in score.interval)
        return f"{100 * score.value:.2f} %", interval
    if score.interval is not None:
        interval = " to ".join(f"{bound:.4g}" for bound in score.interval)
    return f"{score.value:.4g}", interval
