# SPDX-License-Identifier: Apache-2.0
"""Measure certified policies beside fixed budgets, on images that nothing was chosen on.

    python benchmarks/policies.py
    python benchmarks/policies.py --draw

The 5,000 test canvases of digits-sum are split in halves at random. One half calibrates policies,
and `saccade bench` measures them on the other half, in turn with every fixed budget. The circuit is
one that loses with every module that goes (nac_sizes.py makes it). `--draw` only draws the picture
in docs/policies.md again, from the result.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from policies_picture import draw
from result_file import write_result

from saccade.core.leftovers import temporary_folder
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.evaluation.calibrate import calibrate
from saccade.exporter.exported import ExportOptions, export
from saccade.exporter.policy.options import CalibrateOptions
from saccade.models.data.splits import load_data, rows_by_split
from saccade.models.preprocessing import Preprocessing
from saccade.serving.bench.bench import BenchReport, bench
from saccade.serving.bench.options import BenchOptions
from saccade.serving.bench.policies import ratio

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "policies.json"
PICTURE = ROOT / "docs" / "policies.png"
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0625, 0.015625)
RISKS = (0.005, 0.01, 0.02, 0.03)
DATA = "digits-sum"
_PER_TEST_SAMPLE = 5  # the test part of an .npz is a fifth


def write_halves(folder: Path, preprocessing: Preprocessing, seed: int) -> tuple[Path, Path]:
    """Write the half that calibrates, and an .npz whose test part is the other half."""
    data = load_data(DATA, "test", preprocessing=preprocessing)
    mine, other = np.array_split(np.random.default_rng(seed).permutation(len(data.labels)), 2)
    calibration, measured = folder / "calibration.npz", folder / "measured.npz"
    names = np.array(data.class_names)
    np.savez(calibration, images=data.images[mine])
    labels = np.tile(data.labels[other], _PER_TEST_SAMPLE)
    part = rows_by_split(labels)["test"]
    images = np.zeros((len(labels), *data.images.shape[1:]), np.uint8)
    for label in range(len(names)):
        own = other[data.labels[other] == label]
        images[part[labels[part] == label]] = data.images[own]
    np.savez(measured, images=images, labels=labels, class_names=names)
    return calibration, measured


def policies(artefacts: Path, out: Path, options: argparse.Namespace) -> BenchReport:
    """Calibrate on one half, and measure on the other."""
    with temporary_folder("policies") as temporary:
        preprocessing = ArtefactFolder(artefacts).manifests[0].preprocessing
        assert preprocessing is not None
        mine, other = write_halves(temporary, preprocessing, options.seed)
        quick = BenchOptions(
            temporary / "quick", data=str(other), server=False, limit=64, seconds=30
        )
        bench(artefacts, quick)  # policies are chosen by measured time
        calibrate(artefacts, CalibrateOptions(data=str(mine), split="all", risk=RISKS))
        return bench(
            artefacts,
            BenchOptions(
                out,
                data=str(other),
                server=False,
                force=True,
                seconds=options.seconds,
                rounds=options.rounds,
                replace_frontier=True,
            ),
        )


def result_of(report: dict[str, Any]) -> dict[str, Any]:
    """Return the figures without raw samples, and each budget's throughput over the full one's."""
    full = _rounds(report["variants"][0])
    budgets = [
        {
            "variant": variant["variant"],
            "budget": variant["budget"],
            "score": variant["score"],
            "images_per_second": _point(variant)["inferences_per_second"],
            "times_full": vars(ratio(_rounds(variant), full)),
        }
        for variant in report["variants"]
    ]
    kept = ("model", "date", "machine", "options", "policies_left_out")
    measured = [
        {
            key: value
            for key, value in policy.items()
            if key not in ("in_process", "grpc", "samples")
        }
        | {"images_per_second": _point(policy)["inferences_per_second"]}
        for policy in report.get("policies", ())
    ]
    return {key: report[key] for key in kept if key in report} | {
        "budgets": budgets,
        "policies": measured,
    }


def _point(figures: dict[str, Any]) -> dict[str, Any]:
    inside = figures["in_process"]
    point: dict[str, Any] = inside[f"batch_{inside['best_batch']}"]
    return point


def _rounds(figures: dict[str, Any]) -> list[float]:
    rounds: list[float] = _point(figures)["inferences_per_second_rounds"]
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--checkpoint", type=Path, default=ROOT / "build" / "nac_sizes" / "256-1.safetensors"
    )
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "benchmarks" / "policies")
    parser.add_argument("--seconds", type=float, default=600, help="longest time")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", action="store_true", help="only draw the picture again")
    options = parser.parse_args()
    if not options.draw:
        artefacts = options.build / "nac"
        if not artefacts.exists():
            artefacts.parent.mkdir(parents=True, exist_ok=True)
            export(options.checkpoint, ExportOptions(artefacts, name="nac", budget=BUDGETS))
        made = policies(artefacts, options.build / "report", options)
        write_result(RESULT, {"checkpoint": options.checkpoint.stem, **result_of(made.to_dict())})
    draw(json.loads(RESULT.read_text()), PICTURE)


if __name__ == "__main__":
    main()
