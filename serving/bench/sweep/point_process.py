# SPDX-License-Identifier: Apache-2.0
"""Export and score one point in a worker process; a half that is done already is skipped."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.core.files import write_atomically
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.tasks import EvaluateOptions, SplitName, TaskName
from saccade.exporter.export import ExportOptions, export
from saccade.models.scores.results import EvaluationResult


@dataclass(frozen=True)
class PointTask:
    """A point to export and score, and the folders for its files."""

    checkpoint: str
    name: str | None
    slots: str | None
    data: str | None
    split: SplitName | None
    task: TaskName | None
    limit: int | None
    runtime: str
    op_library: bool
    place: str
    folder: str
    budget: str
    precision: str


@dataclass(frozen=True)
class Refusal:
    """Why a point was refused and at which stage; both are empty if it passed."""

    stage: str = ""
    reason: str = ""


def main(task: PointTask) -> Refusal:
    """Do what is missing. A refusal of the point is an answer; any other error is raised."""
    place, folder = Path(task.place), Path(task.folder)
    stage = "export"
    try:
        if not folder.exists():
            export(Path(task.checkpoint), _export_options(task, folder))
        stage = "score"
        if not (place / "score.json").exists():
            options = EvaluateOptions(
                task.data,
                split=task.split,
                task=task.task,
                limit=task.limit,
                runtime=task.runtime,
                op_library=task.op_library,
            )
            (result,) = evaluate(folder, options).results
            write_atomically(place / "score.json", json.dumps(as_json(result)).encode())
    except SaccadeError as error:
        if isinstance(error.__cause__, OSError):  # a full disk says nothing about the point
            raise
        return Refusal(stage, str(error))
    return Refusal()


def as_json(result: EvaluationResult) -> dict[str, Any]:
    """Return a score with each sample's value, as a sweep stores it."""
    return {**asdict(result), "samples": [float(value) for value in result.samples]}


def _export_options(task: PointTask, folder: Path) -> ExportOptions:
    return ExportOptions(
        folder,
        name=task.name,
        budget=(task.budget,),
        slots=Path(task.slots) if task.slots else None,
        precision=(task.precision,),
    )
