# SPDX-License-Identifier: Apache-2.0
"""Folders of models whose speed is measured, and servers of them under load."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from result_file import BUILD

from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.export import ExportOptions, export
from saccade.models.checkpoint import save
from saccade.models.nac.model import NAC, NACConfig
from saccade.models.preprocessing import Preprocessing
from saccade.serving.bench.load import LoadGenerator
from saccade.serving.repository.deploy import deploy
from saccade.serving.repository.model_config import read_config
from saccade.serving.repository.options import RepositoryOptions
from saccade.serving.server.addresses import ServeOptions
from saccade.serving.server.server import Server

DIGITS = "shipped:digits-sum"
IMAGES = 256
QUIET = ServeOptions(
    grpc_port=0, http_port=0, metrics_port=0, ready_port=0, probe_interval_s=600, restart=False
)


def bench_config(modules: int = 256) -> NACConfig:
    """Return the configuration `bench`.

    d 128, code 64, 4 propagator layers with 4 heads, ffn 256, read-in 1 head, 64 tokens, 4
    read-out modules. The tokens are the 4x4 patches of a 32x32 color image.
    """
    return NACConfig(
        height_px=32,
        width_px=32,
        channels=3,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        patch_px=4,
        modules=modules,
        readout_modules=4,
        dim=128,
        code_dim=64,
        signature_dim=16,
        propagator_layers=4,
        heads=4,
        ffn_dim=256,
        classes=10,
        signature_init="random",  # does not affect speed, and the prior takes seconds
    )


def bench_folder(*, modules: int, budgets: tuple[float, ...]) -> Path:
    """Return the artefact folder `bench`, with random weights; created once and then reused."""
    folder = BUILD / f"bench-{modules}-{'-'.join(f'{budget:g}' for budget in budgets)}"
    if folder.exists():
        return folder
    config = bench_config(modules)
    rng = np.random.default_rng(config.seed)
    shape = (config.height_px, config.width_px, config.channels)
    BUILD.mkdir(parents=True, exist_ok=True)
    checkpoint = save(
        BUILD / "bench.safetensors",
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


def digits_folder(name: str, budgets: tuple[float, ...], checkpoint: str | Path = DIGITS) -> Path:
    """Return the artefact folder `nac` of a circuit; created once and then reused."""
    folder = BUILD / name
    if not folder.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        export(checkpoint, ExportOptions(folder, name="nac", budget=budgets))
    return folder


def random_images(folder: Path, count: int) -> np.ndarray:
    """Return random images in the size of the folder's model.

    Shapes: uint8 [count h w c].
    """
    declared = ArtefactFolder(folder).manifests[0].preprocessing
    shape = (count, declared.height_px, declared.width_px, declared.channels)
    return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)


def put_dummy(model: Path, code: str) -> None:
    """Let Python code take the place of a variant, whose folder in a repository is `model`."""
    config = read_config(model / "config.pbtxt")
    config.backend, config.default_model_filename = "python", "model.py"
    for field in ("parameters", "optimization", "model_operations", "model_warmup"):
        config.ClearField(field)
    (model / "config.pbtxt").write_text(str(config))
    (model / "1" / "model.py").write_text(code)


@contextmanager
def under_load(folder: Path | ArtefactFolder, **repository: Any) -> Iterator[LoadGenerator]:
    """Serve a folder, with these options of its repository, and yield a generator of load."""
    with tempfile.TemporaryDirectory() as place:
        options = RepositoryOptions(Path(place) / "repository", **repository)
        deploy(folder, options)
        with (
            Server(options.out, QUIET) as server,
            LoadGenerator(server.url, server_pid=server.pid) as load,
        ):
            yield load
