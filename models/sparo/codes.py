# SPDX-License-Identifier: Apache-2.0
"""Codes of many images and texts by slot, from a model in memory."""

from collections.abc import Sequence

import numpy as np
import torch

from saccade.models.sparo.model import Sparo
from saccade.models.sparo.pooling import PoolingOutput
from saccade.models.sparo.text_tokens import encode_texts

_CHUNK = 200


@torch.no_grad()
def image_slots(model: Sparo, images: np.ndarray) -> np.ndarray:
    """Return the codes of images, by slot if there are slots.

    Shapes: images [n h w c] uint8 -> [n l v], or [n 1 e] for a baseline.
    """
    device = next(model.parameters()).device
    parts = (np.asarray(images[i : i + _CHUNK]) for i in range(0, len(images), _CHUNK))
    return _gathered([model.encode_image(torch.from_numpy(part).to(device)) for part in parts])


@torch.no_grad()
def text_slots(model: Sparo, texts: Sequence[str], *, truncate: bool = False) -> np.ndarray:
    """Return the codes of texts, by slot if there are slots; `truncate` cuts texts that are long.

    Shapes: -> [len(texts) l v], or [len(texts) 1 e] for a baseline.
    """
    device = next(model.parameters()).device
    tokens = torch.from_numpy(encode_texts(model.runtime_metadata(), texts, truncate=truncate))
    return _gathered([model.encode_text(part.to(device)) for part in tokens.split(_CHUNK)])


def _gathered(pooled: Sequence[PoolingOutput]) -> np.ndarray:
    arrays = [batch.code.unsqueeze(1) if batch.slots is None else batch.slots for batch in pooled]
    return torch.cat(arrays).float().cpu().numpy()
