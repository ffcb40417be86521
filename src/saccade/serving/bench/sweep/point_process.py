# SPDX-License-Identifier: Apache-2.0
"""One point exported and scored in a worker; each half is left out where it was done."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.exporter.evaluation.evaluate import evaluate
from saccade.exporter.evaluation.options import EvaluateOptions, TaskName
from saccade.exporter.exported import ExportOptions, export
from saccade.files import write_atomically
from saccade.models.scores.results import EvaluationResult


@dataclass(frozen=True)
class Task:
    """A point, and where its files go."""

    checkpoint: str
    name: str | None
    slots: str | None
    data: str | None
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
    """Why a point was refused and at which stage; of one that passed, both are empty."""

    stage: str = ""
    reason: str = ""


def main(task: Task) -> Refusal:
    """Do what is not done yet; a refusal of the point is an answer, all else says nothing of it."""
    place, folder = Path(task.place), Path(task.folder)
    stage = "export"
    try:
        if not folder.exists():
            export(Path(task.checkpoint), _export_options(task, folder))
        stage = "score"
        if not (place / "score.json").exists():
            options = EvaluateOptions(
                task.data,
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
    """A score with each sample's value, as a sweep keeps it."""
    return {**asdict(result), "samples": [float(value) for value in result.samples]}


def _export_options(task: Task, folder: Path) -> ExportOptions:
    return ExportOptions(
        folder,
        name=task.name,
        budget=(task.budget,),
        slots=Path(task.slots) if task.slots else None,
        precision=(task.precision,),
    )
