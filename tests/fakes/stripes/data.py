# SPDX-License-Identifier: Apache-2.0
"""Pictures of stripes, drawn by seed."""

import hashlib

import numpy as np
from fakes.stripes.config import SIDE_PX

SEEDS = {"train": 0, "validation": 1, "test": 2}


def stripes(split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """So many pictures and which way they run.

    Shapes: -> images [n 8 8 1] uint8, labels [n] int64.
    """
    rng = np.random.default_rng(SEEDS[split])
    labels = rng.integers(0, 2, count)
    across = np.where(np.arange(SIDE_PX) % 4 < 2, 200, 60)[None, :, None]
    images = np.where(labels[:, None, None] == 0, across, across.transpose(0, 2, 1))
    return (images + rng.integers(-50, 51, images.shape)).astype(np.uint8)[..., None], labels


def sha256_of(images: np.ndarray) -> str:
    """Of the pictures."""
    return hashlib.sha256(images.tobytes()).hexdigest()
