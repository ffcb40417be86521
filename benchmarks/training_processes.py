# SPDX-License-Identifier: Apache-2.0
"""Measure how fast one and two processes train a tiny SoT on photographs, which decoding limits.

    python benchmarks/training_processes.py [--rounds 5 --steps 12]

The variants take turns, so that other programs slow all of them. Pieces of scikit-learn's two
photographs, enlarged, are stored as JPEG; none stays in memory once it is decoded. `whole batch
each` is how processes worked before each decoded its own rows. Figures are without the first step,
and of the CPU time of all processes together; ratios are those within a round.
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
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from PIL import Image
from result_file import write_result

from saccade.core.machine import this_machine
from saccade.core.verbosity import verbosity
from saccade.models.data.samples import images as image_file
from saccade.models.training.loop import Run
from saccade.models.training.options import TrainOptions
from saccade.models.training.task import BatchImages
from saccade.models.training.train import train

# Number of processes, each with one decoding thread, and whether each decodes the whole batch.
VARIANTS = {
    "1 process": (1, False),
    "2 processes": (2, False),
    "2 processes, whole batch each": (2, True),
}
SIDE_PX, PER_CLASS, BATCH = 640, 60, 16
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
    """Train as one process of a variant; return its speed, CPU time and decoded images."""
    times, decoded = [], []
    step, opened = Run.step, image_file.Images.opened

    def timed(run: Run) -> None:
        step(run)
        times.append((time.perf_counter(), time.process_time(), len(decoded)))

    def counted(images: Any, row: int, use: Any) -> Any:
        decoded.append(row)
        return opened(images, row, use)

    image_file.KEPT_BYTES = 0
    image_file._pool = cache(lambda: ThreadPoolExecutor(1))
    Run.step, image_file.Images.opened = timed, counted
    Run.after_step = lambda run, advance: None  # no validation
    if VARIANTS[variant][1]:
        BatchImages.__getitem__ = lambda x, part: replace(x, make=lambda _: x.make(x.rows)[part])
    given = TrainOptions(
        out, data, set=TINY, steps=steps, batch=BATCH, augment=("crop", "flip"), side_px=32
    )
    try:
        with verbosity(quiet=True):
            train("sot", given, progress=None)
    except SystemExit:
        pass  # of all processes but the first
    wall_s, cpu_s, count = (last - first for first, last in zip(times[0], times[-1], strict=True))
    images = BATCH * (steps - 1)
    return {"rate": images / wall_s, "cpu_ms": 1000 * cpu_s / images, "decoded": count}


def measured(variant: str, steps: int, data: str) -> dict[str, Any]:
    """Run the processes of a variant; return their speed, CPU time and decoded images."""
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
    found = [json.loads(answer.splitlines()[-1]) for answer in answers]
    return {
        "rate": found[0]["rate"],
        "cpu_ms": sum(one["cpu_ms"] for one in found),
        "decoded": [one["decoded"] for one in found],
    }


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
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder))
        for _ in range(options.rounds):
            for name in VARIANTS:
                found[name].append(measured(name, options.steps, folder))
                print(name, found[name][-1], flush=True)
    content = {
        "machine": asdict(this_machine()),
        "images": f"JPEG of {SIDE_PX} px, cropped to 32 px, in batches of {BATCH}",
        "rounds": options.rounds,
        "steps": options.steps - 1,
        "variants": {name: compared(own, found["1 process"]) for name, own in found.items()},
    }
    write_result(options.out, content)


def compared(own: list[dict[str, Any]], first: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians, with the least and greatest of the ratios to one process in each round."""
    result: dict[str, Any] = {"decoded_by_each_process": own[-1]["decoded"]}
    for key, name in (("rate", "images_per_second"), ("cpu_ms", "cpu_ms_per_image")):
        values = [one[key] for one in own]
        ratios = sorted(value / one[key] for value, one in zip(values, first, strict=True))
        result[name] = statistics.median(values)
        result[f"{name}_ratio"] = [ratios[0], statistics.median(ratios), ratios[-1]]
    return result


if __name__ == "__main__":
    main()
