# SPDX-License-Identifier: Apache-2.0
"""A NAC that is small enough for tests: random weights, random images, no training."""

from pathlib import Path
from typing import Any

import numpy as np

from saccade.models.checkpoint import Checkpoint, save
from saccade.models.preprocessing import Preprocessing

CONFIG: dict[str, Any] = {
    "modules": 16,
    "readout_modules": 2,
    "dim": 32,
    "code_dim": 16,
    "signature_dim": 8,
    "propagator_layers": 1,
    "heads": 2,
    "ffn_dim": 48,
    "mean": (0.3,),
    "std": (0.4,),
}


def tiny_nac(path: Path, *, images: int = 256, **changes: Any) -> Checkpoint:
    """Save an untrained NAC for 8x8 images; `changes` go into its configuration."""
    from saccade.models.nac.model import NAC, NACConfig

    config = NACConfig(**{**CONFIG, **changes})
    model = NAC(config).eval()
    rng = np.random.default_rng(config.seed)
    if config.conditional:
        import torch

        model.rank_modules(torch.from_numpy(rng.integers(0, 256, (32, 8, 8, 1), dtype=np.uint8)))
    return save(
        path,
        family="nac",
        config=config.to_dict(),
        weights=model.state_dict(),
        preprocessing=Preprocessing(8, 8, 1, config.mean, config.std),
        labels=tuple(f"digit {digit}" for digit in range(config.classes)),
        calibration={
            "image": rng.integers(0, 256, (images, 8, 8, 1), dtype=np.uint8),
            "labels": rng.integers(0, config.classes, images),
        },
        card={"data": "random", "seed": config.seed},
    )
