# SPDX-License-Identifier: Apache-2.0
"""Write the test canvases of digits-sum in two random halves: one calibrates, the other reports.

python benchmarks/digits_halves.py --out build/halves
"""

import argparse
from pathlib import Path

import numpy as np

from saccade.models.data.datasets import load_data

CALIBRATION, HELD_OUT = "calibration.npz", "held-out.npz"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1_000)
    options = parser.parse_args()
    data = load_data("digits-sum", "test")
    order = np.random.default_rng(options.seed).permutation(len(data.labels))
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in zip((CALIBRATION, HELD_OUT), np.array_split(order, 2), strict=True):
        np.savez_compressed(
            options.out / name,
            images=data.images[rows],
            labels=data.labels[rows],
            class_names=np.array(data.class_names),
        )
        print(f"{options.out / name}: {len(rows)} canvases")


if __name__ == "__main__":
    main()
