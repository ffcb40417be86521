# SPDX-License-Identifier: Apache-2.0
"""One point of a sweep, the sweep's folder, and options that are refused."""

import errno
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from saccade.core.errors import SaccadeError
from saccade.core.worker import Worker
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.serving.bench.options import SweepOptions
from saccade.serving.bench.sweep import points
from saccade.serving.bench.sweep.points import PointTask, Refusal
from saccade.serving.bench.sweep.state import differences, open_repository

pytest.importorskip("torch", reason="torch is not installed: pip install '.[export]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is missing: pip install '.[cpu]'")


def task_in(
    place: Path,
    checkpoint: Path,
    data: str | None = None,
    limit: int | None = None,
    split: Any = None,
) -> PointTask:
    """A budget of one half."""
    return PointTask(
        checkpoint=str(checkpoint), name=None, slots=None, place=str(place), budget="0.5",
        evaluation=EvaluateOptions(data, split=split, limit=limit), precision="fp32",
    )  # fmt: skip


def test_a_point_is_exported_through_the_gate(tiny_checkpoint, tmp_path, traced_before):
    task = task_in(tmp_path / "point", tiny_checkpoint, data="digits", limit=20, split="val")
    assert points.main(task) == Refusal()
    (manifest,) = ArtefactFolder(tmp_path / "point" / "export").manifests
    assert manifest.parity.passed and manifest.variant.kept == 8
    result = points.read_result(json.loads((tmp_path / "point" / "score.json").read_bytes()))
    assert result.samples.shape == (20,) and result.scores[0].n == 20
    assert result.split == "validation"
    (tmp_path / "point" / "score.json").unlink()
    (tmp_path / "point" / "export" / manifest.file.name).unlink()
    # In a child, as `sweep` runs it.
    with Worker(points.__name__) as worker:
        answer = worker.ask(task, Refusal)
    assert answer.stage == "score" and manifest.file.name in answer.reason


def test_a_sweep_in_which_nothing_was_done_may_become_another(tmp_path):
    for rounds in (1, 2):
        with open_repository(tmp_path, {"rounds": rounds}, force=False):
            assert differences(tmp_path, {"rounds": rounds}) == []
    (tmp_path / "points" / "nac-b1000-fp32").mkdir(parents=True)
    (tmp_path / "points" / "nac-b1000-fp32" / "score.json").write_text("{}")
    with pytest.raises(SaccadeError, match="rounds is 3, was 2"):
        with open_repository(tmp_path, {"rounds": 3}, force=False):
            pass


def test_a_full_disk_says_nothing_of_the_point(tmp_path):
    def full(*_: Any) -> None:
        raise SaccadeError("cannot be written") from OSError(errno.ENOSPC, "No space left")

    task = task_in(tmp_path, Path("nac.safetensors"))
    with mock.patch.object(points, "export", full):
        with pytest.raises(SaccadeError, match="cannot be written"):
            points.main(task)
    with mock.patch.object(points, "export", side_effect=SaccadeError("too coarse")):
        assert points.main(task) == Refusal("export", "too coarse")


@pytest.mark.parametrize(
    "change",
    [
        {"precision": ("fp8",)},
        {"precision": ("fp32", "fp32")},
        {"engine": ("tensorrt-rtx",)},
        {"engine": ()},
        {"jobs": 0},
        {"seconds": 0},
        {"limit": 1},
    ],
)
def test_options_out_of_range_are_refused(change):
    with pytest.raises(SaccadeError, match=f"--{next(iter(change))}"):
        SweepOptions(Path("swept"), **change)
