# SPDX-License-Identifier: Apache-2.0
"""Self-distillation as in DINO, small, for the recipes: images of one size, without labels."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.models.checkpoint import save
from saccade.models.families import new_model
from saccade.models.preprocessing import Preprocessing
from saccade.models.sparo.config import SparoConfig
from saccade.models.sparo.model import Sparo

STUDENT_T, TEACHER_T, CENTER = 0.1, 0.04, 0.9  # as in DINO's code
MOMENTUM = 0.99  # at the start; DINO's code has 0.996 for far more steps
AREA = (0.5, 1.0)  # a crop's share of the image
OUTPUTS, HIDDEN, BOTTLENECK = 256, 256, 64


class Head(nn.Module):
    """The head of DINO: code [b d] -> [b OUTPUTS], cosines between -1 and 1.

    Without its batch normalization, an option there, all answers became the same here.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(dim, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.GELU(),
            nn.Linear(HIDDEN, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.GELU(),
            nn.Linear(HIDDEN, BOTTLENECK),
        )  # fmt: skip
        self.last = nn.Linear(BOTTLENECK, OUTPUTS, bias=False)

    def forward(self, code: Tensor) -> Tensor:
        return F.linear(F.normalize(self.layers(code), dim=-1), F.normalize(self.last.weight))


def crops(images: Tensor, area: tuple[float, float], draw: torch.Generator) -> Tensor:
    """Return a random crop of each image at its size, half of them mirrored, brighter or darker.

    Shapes: [b h w c] -> the same.
    """
    b = len(images)
    side = (area[0] + (area[1] - area[0]) * torch.rand(b, 1, generator=draw)).sqrt()
    place = torch.zeros(b, 2, 3)
    place[:, :, 2] = (1 - side) * (2 * torch.rand(b, 2, generator=draw) - 1)
    mirrored = torch.where(torch.rand(b, 1, generator=draw) < 0.5, -1.0, 1.0)
    place[:, 0, 0], place[:, 1, 1] = (side * mirrored)[:, 0], side[:, 0]
    pixels = images.permute(0, 3, 1, 2).float()
    grid = F.affine_grid(place, list(pixels.shape), align_corners=False)
    light = 0.6 + 0.8 * torch.rand(b, 1, 1, 1, generator=draw)
    seen = F.grid_sample(pixels, grid, align_corners=False) * light
    return seen.clamp(0, 255).permute(0, 2, 3, 1)


def self_distilled(
    out: Path, *, data: str, seed: int, steps: int, batch: int, learning_rate: float,
    set: dict[str, Any],
) -> None:  # fmt: skip
    """Train an image tower on the training part of a file, and write its checkpoint.

    The teacher, which is kept, follows the student; each is shown the other's crop. There are no
    small crops.
    Source: Caron et al. 2021; with SPARO Vani et al. 2024, section 3.4.
    """
    with np.load(data) as arrays:
        images = torch.from_numpy(arrays["train_images"])
    config = SparoConfig(**set, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    student = nn.ModuleList([new_model(Sparo, config), Head(config.code_dim)]).train()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), learning_rate, weight_decay=0.04)
    warm = max(1, steps // 10)

    def rate(step: int) -> float:
        rising, falling = step / warm, np.cos(np.pi / 2 * step / steps) ** 2
        return float(min(rising, falling))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    center = torch.zeros(OUTPUTS)

    def answers(model: nn.ModuleList, seen: Tensor) -> Tensor:
        answer: Tensor = model[1](model[0].encode_image(seen).code)
        return answer

    for step in range(steps):
        chosen = images[torch.randint(len(images), (batch,), generator=draw)]
        first, second = (crops(chosen, AREA, draw) for _ in range(2))
        with torch.no_grad():
            given = torch.cat([answers(teacher, second), answers(teacher, first)])
        wanted = ((given - center) / TEACHER_T).softmax(-1)
        found = answers(student, torch.cat([first, second]))
        loss = -(wanted * (found / STUDENT_T).log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        optimizer.step()
        schedule.step()
        center = CENTER * center + (1 - CENTER) * given.mean(0)
        momentum = 1 - (1 - MOMENTUM) * (np.cos(np.pi * step / steps) + 1) / 2
        with torch.no_grad():
            for kept, new in zip(teacher.parameters(), student.parameters(), strict=True):
                kept.lerp_(new, 1 - momentum)
    save(
        out, family="sparo", config=config.to_dict(), weights=teacher[0].state_dict(),
        preprocessing=Preprocessing.of(config), labels=(), card={},
        calibration={"image": images[:64].numpy()},
    )  # fmt: skip
