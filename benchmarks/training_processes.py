# SPDX-License-Identifier: Apache-2.0
"""Measure how fast one and two processes train a tiny SoT on photographs, which decoding limits.

    python benchmarks/training_processes.py [--rounds 5 --steps 12]

The variants take turns, so that other programs slow all of them. Pieces of scikit-learn's two
photographs, enlarged, are stored as JPEG, decoded for every crop and kept in memory by nobody.
`whole batch each` is how processes worked before each decoded its own rows. A figure is the median
over the rounds of images per second without the first step; a ratio, that of ratios in one round.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from PIL import Image
from result_file import write_result

from saccade.machine import this_machine
from saccade.models.data.samples import images as image_file
from saccade.models.training.loop import Run
from saccade.models.training.options import TrainOptions
from saccade.models.training.task import Task
from saccade.models.training.train import train
from saccade.verbosity import verbosity

# Processes, decoding threads of each, and whether each decodes the whole batch.
VARIANTS = {
    "1 process": (1, 1, False),
    "2 processes": (2, 1, False),
    "2 processes, whole batch each": (2, 1, True),
    "1 process, 2 threads": (1, 2, False),
}
SIDE_PX, PER_CLASS, BATCH = 1024, 24, 16
TINY = {"dim": 8, "heads": 1, "layers": 1, "mlp_dim": 8, "pool_heads": 1, "m": 2, "n": 2}
RESULT = Path(__file__).with_name("results") / "training_processes.json"


def write_photographs(folder: Path) -> None:
    """Write enlarged pieces of both photographs as class folders."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    for name, photograph in zip(("china", "flower"), load_sample_images().images, strict=True):
        (folder / name).mkdir(parents=True)
        for number in range(PER_CLASS):
            top, left = rng.integers(200, size=2)
            piece = Image.fromarray(photograph[top : top + 200, left : left + 200])
            piece.resize((SIDE_PX, SIDE_PX)).save(folder / name / f"{number}.jpg", quality=90)


def trained(variant: str, steps: int, data: str, out: Path) -> dict[str, Any]:
    """Train as one process of a variant; return its seconds per step and its decoded images."""
    _, threads, whole = VARIANTS[variant]
    times, decoded = [], []
    step, opened = Run.step, image_file.Images.opened

    def timed(run: Run) -> None:
        step(run)
        times.append((time.perf_counter(), len(decoded)))

    def counted(images: Any, row: int, use: Any) -> Any:
        decoded.append(row)
        return opened(images, row, use)

    image_file.KEPT_BYTES = 0
    image_file._pool = cache(lambda: ThreadPoolExecutor(threads))
    Run.step, image_file.Images.opened = timed, counted
    Run.after_step = lambda run, advance: None  # no validation
    if whole:
        Task.own = lambda task, samples: slice(samples)
    given = TrainOptions(
        out, data, set=TINY, steps=steps, batch=BATCH, augment=("crop", "flip"), side_px=32
    )
    try:
        with verbosity(quiet=True):
            train("sot", given, progress=None)
    except SystemExit:
        pass  # of all processes but the first
    (began, before), (ended, after) = times[0], times[-1]
    return {"rate": BATCH * (steps - 1) / (ended - began), "decoded": after - before}


def measured(variant: str, steps: int, data: str) -> dict[str, Any]:
    """Run the processes of a variant and return what the first one found."""
    count = VARIANTS[variant][0]
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, "--variant", variant, "--steps", str(steps)]
        command += ["--data", data, "--out", str(Path(folder) / "sot.safetensors")]
        started = [
            subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=os.environ | place | {"RANK": rank}
            )
            for rank in map(str, range(count))
        ]
        answers = [process.communicate()[0] for process in started]
    found: dict[str, Any] = json.loads(answers[0].splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(trained(options.variant, options.steps, options.data, options.out)))
        return
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    decoded: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder))
        for _ in range(options.rounds):
            for name in VARIANTS:
                found = measured(name, options.steps, folder)
                rates[name].append(found["rate"])
                decoded[name] = found["decoded"]
                print(name, found, flush=True)
    first = rates["1 process"]
    content = {
        "machine": asdict(this_machine()),
        "images": f"JPEG of {SIDE_PX} px, cropped to 32 px, batches of {BATCH}",
        "rounds": options.rounds,
        "images_per_second": {
            name: round(statistics.median(own), 1) for name, own in rates.items()
        },
        "ratio_to_one_process": {
            name: [
                round(cut, 2) for cut in np.percentile(np.divide(own, first), (0, 50, 100)).tolist()
            ]
            for name, own in rates.items()
        },
        "decoded_by_the_first_process": {
            name: f"{count} of {BATCH * (options.steps - 1)}" for name, count in decoded.items()
        },
    }
    write_result(options.out, content)


if __name__ == "__main__":
    main()
