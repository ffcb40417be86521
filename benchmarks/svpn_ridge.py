# SPDX-License-Identifier: Apache-2.0
"""Measure how a ridge keeps exact svPN from amplifying rounding on pieces of photographs.

    OMP_NUM_THREADS=1 python benchmarks/svpn_ridge.py

The shipped SoT gets a new head for 40 pieces (64 x 64 px) of scikit-learn's two photographs. With
its weights as they are and with different ridges, the embeddings of the training pieces in float32
are compared with those in float64, as the gate does (also with every weight moved by a rounding).
The result goes to results/svpn_ridge.json.
"""

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import sklearn
import torch
from PIL import Image
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.exporter.gate.conditioning import perturbed
from saccade.exporter.gate.metrics import FLOORS, THRESHOLDS, row_errors
from saccade.models.checkpoint import Checkpoint
from saccade.models.sot.model import SoT
from saccade.models.training.train import TrainOptions, train

RIDGES = (0.0, 1e-4, 1e-3, 1e-2)
SIDE, ROWS, COLUMNS = 64, 2, 10
RESULT = Path(__file__).parent / "results" / "svpn_ridge.json"


def pieces(folder: Path) -> Path:
    """Write the pieces as class folders."""
    for name in ("china", "flower"):
        photograph = Image.open(Path(sklearn.__file__).parent / f"datasets/images/{name}.jpg")
        (folder / name).mkdir()
        for index in range(ROWS * COLUMNS):
            row, column = divmod(index, COLUMNS)
            left, top = column * SIDE, row * SIDE
            piece = photograph.crop((left, top, left + SIDE, top + SIDE))
            piece.save(folder / name / f"{index:02}.png")
    return folder


@torch.no_grad()
def errors(checkpoint: Checkpoint, ridge: float) -> dict[str, Any]:
    """Return the embeddings' errors in float32 with that ridge, and the least singular values."""
    config = replace(checkpoint.build().config, svpn_ridge=ridge)
    model = SoT(config, fresh=False).eval()
    model.load_state_dict(checkpoint.weights)
    wide = SoT(config, fresh=False).eval().double()
    wide.load_state_dict(checkpoint.weights)
    images = torch.from_numpy(np.unique(checkpoint.calibration["image"], axis=0))
    expected = wide.outputs(images)
    reference = {"embedding": expected["embedding"].numpy()}
    runs = [model, *(perturbed(model, seed) for seed in (1, 2))]
    found = [{"embedding": run.outputs(images)["embedding"].numpy()} for run in runs]
    worst = row_errors(found, reference, FLOORS["fp32"])["embedding"]
    values = torch.linalg.svdvals(expected["covariance"])
    return {
        "images": len(images),
        "relative_error": float(worst.max()),
        "sensitive_share": float((worst > THRESHOLDS["fp32"]["relative_error"]).mean()),
        "median_of_least_over_largest": float((values[..., -1] / values[..., 0]).median()),
    }


def main() -> None:
    """Train once and measure each ridge."""
    with tempfile.TemporaryDirectory() as folder:
        options = TrainOptions(
            Path(folder) / "photographs.safetensors",
            data=str(pieces(Path(folder))),
            init=Path("shipped:sot-shapes"),
            freeze=("trunk",),
            steps=30,
        )
        checkpoint = train("sot", options, progress=None)
    rows = {f"{ridge:g}": errors(checkpoint, ridge) for ridge in RIDGES}
    for ridge, row in rows.items():
        print(f"ridge {ridge}: {row}")
    write_result(RESULT, {"machine": this_machine().to_dict(), "ridges": rows})


if __name__ == "__main__":
    main()
