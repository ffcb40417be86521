# SPDX-License-Identifier: Apache-2.0
"""Compare bulk inference with plain ONNX Runtime loops and with the service: images per second.

    python benchmarks/bulk.py                  # three rounds of 20,000 images: ten minutes

All three answer the same PNG files on the same cores, in turn, including decoding. Each uses one
process per core (the service: one caller per core). The loops are hand-written: read, decode,
stack, run. Start-up counts for loops and jobs, but not for the server. Writes results/bulk.json.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from PIL import Image
from result_file import options_of, write_result
from served_models import DIGITS, under_load

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.export import ExportOptions, export
from saccade.serving.bulk.bulk import bulk
from saccade.serving.bulk.options import BulkOptions
from saccade.serving.client.client import Client

BUDGETS = (1.0, 0.0625)
BATCH = 64
LEAST_SHARE = 0.9
LOOP = """
import sys, numpy as np, onnxruntime as ort
from PIL import Image
model, batch, files = sys.argv[1], int(sys.argv[2]), sys.stdin.read().splitlines()
options = ort.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
height, width, channels = session.get_inputs()[0].shape[1:]
answers = []
for at in range(0, len(files), batch):
    images = []
    for file in files[at : at + batch]:
        with Image.open(file) as image:
            images.append(np.asarray(image.convert("L").resize((width, height)))[..., None])
    answers.append(session.run(["probabilities"], {"image": np.stack(images)})[0])
print(len(np.concatenate(answers)))
"""


def main() -> None:
    options = _options()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="saccade-bench-") as name:
        place = Path(name)
        folder = place / "artefact"
        export(DIGITS, ExportOptions(folder, budget=BUDGETS))
        files = _images(place / "images", options.images)
        rows = [_row(folder, place, files, budget, cores, options) for budget in BUDGETS]
    result = {
        "benchmark": "bulk",
        "images": len(files),
        "rounds": options.rounds,
        "processes": cores,
        "batch": BATCH,
        "least_share": LEAST_SHARE,
        "budgets": rows,
    }
    write_result(options.out, result)


def _options() -> argparse.Namespace:
    parser = options_of(__doc__, "bulk", rounds=3)
    parser.add_argument("--images", type=int, default=20_000)
    return parser.parse_args()


def _images(folder: Path, count: int) -> list[Path]:
    folder.mkdir()
    rng = np.random.default_rng(0)
    files = [folder / f"{index:06}.png" for index in range(count)]
    for file in files:
        pixels = rng.integers(0, 256, (24, 24), dtype=np.uint8)
        Image.fromarray(pixels).save(file, compress_level=1)
    return files


def _row(
    folder: Path,
    place: Path,
    files: list[Path],
    budget: float,
    cores: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    variants = ArtefactFolder(folder).variants
    variant = next(variant for variant in variants if variant.main.variant.budget == budget)
    seconds: dict[str, list[float]] = {"loops": [], "bulk": [], "service": []}
    for turn in range(options.rounds):
        seconds["loops"].append(_loops(folder / variant.main.file.name, files, cores))
        out = place / f"out-{budget}-{turn}"
        began = time.perf_counter()
        report = bulk(folder, BulkOptions(str(place / "images"), str(out), budget=budget))
        seconds["bulk"].append(time.perf_counter() - began)
        assert report.answers == len(files)
        with under_load(folder) as load:
            router = variant.main.variant.model
            seconds["service"].append(_served(load.url, router, files, budget, cores))
        shares = {key: f"{len(files) / values[-1]:,.0f}/s" for key, values in seconds.items()}
        print(f"budget {budget:g}, round {turn + 1}: {shares}", flush=True)
    ratios = {
        key: [a / b for a, b in zip(seconds[key], seconds["bulk"], strict=True)]
        for key in ("loops", "service")
    }
    return {
        "variant": variant.name,
        "per_second": {k: [len(files) / s for s in values] for k, values in seconds.items()},
        "bulk_to_loops": ratios["loops"],
        "bulk_to_service": ratios["service"],
        "bulk_to_loops_median": statistics.median(ratios["loops"]),
        "bulk_to_service_median": statistics.median(ratios["service"]),
        "missed": statistics.median(ratios["loops"]) < LEAST_SHARE,
    }


def _loops(model: Path, files: list[Path], processes: int) -> float:
    began = time.perf_counter()
    running = []
    for part in range(processes):
        command = [sys.executable, "-c", LOOP, str(model), str(BATCH)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        process.stdin.write("\n".join(map(str, files[part::processes])))
        process.stdin.close()
        running.append(process)
    counts = []
    for process in running:
        assert process.stdout is not None
        counts.append(int(process.stdout.read()))
        assert process.wait() == 0
    assert sum(counts) == len(files)
    return time.perf_counter() - began


def _served(url: str, router: str, files: list[Path], budget: float, callers: int) -> float:
    began = time.perf_counter()

    def ask(part: int) -> int:
        own, count = files[part::callers], 0
        with Client(url, router) as client:
            for at in range(0, len(own), BATCH):
                count += len(client.classify(own[at : at + BATCH], budget=budget))
        return count

    with ThreadPoolExecutor(callers) as pool:
        assert sum(pool.map(ask, range(callers))) == len(files)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
