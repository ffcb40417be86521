# SPDX-License-Identifier: Apache-2.0
"""The configuration `bench` with random weights, exported and ready to serve."""

from pathlib import Path

import numpy as np
from bench_config import bench_config

from saccade.exporter.exported import ExportOptions, export
from saccade.models.checkpoint import save
from saccade.models.nac.model import NAC
from saccade.models.preprocessing import Preprocessing

IMAGES = 256


def bench_folder(place: Path, *, modules: int, budgets: tuple[float, ...]) -> Path:
    """Return the artefact folder `bench`; it is created once and then reused."""
    folder = place / f"bench-{modules}-{'-'.join(f'{budget:g}' for budget in budgets)}"
    if folder.exists():
        return folder
    config = bench_config(modules)
    rng = np.random.default_rng(config.seed)
    shape = (config.height_px, config.width_px, config.channels)
    place.mkdir(parents=True, exist_ok=True)
    checkpoint = save(
        place / "bench.safetensors",
        family="nac",
        config=config.to_dict(),
        weights=NAC(config).eval().state_dict(),
        preprocessing=Preprocessing(*shape, config.mean, config.std),
        labels=tuple(str(index) for index in range(config.classes)),
        calibration={
            "image": rng.integers(0, 256, (IMAGES, *shape), dtype=np.uint8),
            "labels": rng.integers(0, config.classes, IMAGES),
        },
        card={"data": "random weights and images", "seed": config.seed},
    )
    export(checkpoint, ExportOptions(folder, name="bench", budget=budgets))
    return folder


def random_images(folder: Path, count: int) -> np.ndarray:
    """Return random images in the size of the folder's model.

    Shapes: uint8 [count h w c].
    """
    from saccade.exporter.artefact.folder import ArtefactFolder

    declared = ArtefactFolder(folder).manifests[0].preprocessing
    shape = (count, declared.height_px, declared.width_px, declared.channels)
    return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
