# SPDX-License-Identifier: Apache-2.0
"""Short training runs: few images, an interruption, the losses of some steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from saccade.models.training import loop
from saccade.models.training.task import Task, with_pixels


def few_images(folder: Path) -> str:
    """Write 40 images of noise in two classes, few of which keep a run short."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    np.savez(folder / "few.npz", images=images, labels=np.arange(40) % 2)
    return str(folder / "few.npz")


@contextmanager
def interrupted(after: int) -> Iterator[None]:
    """Within, a run keeps its state after every step, and ends after that many steps."""
    step = loop.Run.step

    def stop(run: loop.Run) -> None:
        if run.done == after:
            raise KeyboardInterrupt
        step(run)

    with patch.object(loop, "SAVE_EVERY_S", 0.0), patch.object(loop.Run, "step", stop):
        with pytest.raises(KeyboardInterrupt):
            yield


def losses_of(task: Task, steps: int, rate: float) -> list[float]:
    """Train without a schedule, and return the loss of each step."""
    modules = [module for module in (task.model, task.auxiliary) if module is not None]
    weights = [weight for module in modules for weight in module.parameters()]
    optimizer, rng, losses = torch.optim.AdamW(weights, lr=rate), np.random.default_rng(0), []
    task.model.train()
    for step in range(steps):
        loss = task.loss(with_pixels(task.batch(step, rng)), step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    task.model.eval()
    return losses
