# SPDX-License-Identifier: Apache-2.0
"""One point exported and scored: `python -m saccade.serving.bench.sweep.point_process TASK`.

Each half is left out where it was done. The answer is one JSON object: the stage that failed and
why, or nothing.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from saccade.errors import SaccadeError
from saccade.export.evaluation.evaluate import evaluate
from saccade.export.evaluation.options import EvaluateOptions
from saccade.export.exported import ExportOptions, export
from saccade.files import write_atomically
from saccade.models.scores.results import Found


def main(task: dict[str, Any]) -> dict[str, str]:
    """Do what is not done yet; a refusal of the point is an answer, anything else a crash."""
    place, folder = Path(task["place"]), Path(task["folder"])
    stage = "export"
    try:
        if not folder.exists():
            export(Path(task["checkpoint"]), _export_options(task, folder))
        stage = "score"
        if not (place / "score.json").exists():
            options = EvaluateOptions(
                task["data"],
                task=task["task"],
                limit=task["limit"],
                runtime=task["runtime"],
                op_library=task["op_library"],
            )
            (found,) = evaluate(folder, options).found
            write_atomically(place / "score.json", json.dumps(as_json(found)).encode())
    except SaccadeError as error:
        if isinstance(error.__cause__, OSError):  # a full disk says nothing about the point
            raise
        return {"stage": stage, "reason": str(error)}
    return {}


def as_json(found: Found) -> dict[str, Any]:
    """A score with each sample's value, as a sweep keeps it."""
    return {**asdict(found), "samples": [float(each) for each in found.samples]}


def _export_options(task: dict[str, Any], folder: Path) -> ExportOptions:
    return ExportOptions(
        folder,
        name=task["name"],
        budget=(task["budget"],),
        slots=Path(task["slots"]) if task["slots"] else None,
        precision=(task["precision"],),
    )


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
