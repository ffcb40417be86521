# SPDX-License-Identifier: Apache-2.0
"""Models of the sizes that people have, with random weights, as folders of transformers.

Each has config.json, model.safetensors and preprocessor_config.json, as a model hub has them. The
weights are drawn from a fixed seed.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

_PLAIN = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])  # mean and standard deviation
_IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_FIXED = {"lambda1": 0.5, "logit_scale": 2.6592}


def _square(kind: str, pixels: int, values: tuple[Any, Any], **others: Any) -> dict[str, Any]:
    mean, std = values
    way = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}
    size = {"size": {"height": pixels, "width": pixels}, "rescale_factor": 1 / 255}
    named = {"image_processor_type": kind, "image_mean": mean, "image_std": std}
    return named | way | size | others


def _cropped(kind: str, edge: int, pixels: int, values: tuple[Any, Any]) -> dict[str, Any]:
    crop = {"height": pixels, "width": pixels}
    shortest = {"shortest_edge": edge}
    return _square(kind, pixels, values, size=shortest, do_center_crop=True, crop_size=crop)


def _blocks(width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | others


def _clip_sizes(width: int, layers: int, patch: int, text: int) -> dict[str, Any]:
    images = {"patch_size": patch, "image_size": 224, "intermediate_size": 4 * width}
    vision = _blocks(width, layers, width // 64, **images)
    words = _blocks(text, 12, text // 64, intermediate_size=4 * text)
    return {"vision_config": vision, "text_config": words, "projection_dim": text}


_LABELS = {"num_labels": 1000}
_CLASSES = "ForImageClassification"
_DEIT_S = _blocks(384, 12, 6, intermediate_size=1536)
_DINO = {"patch_size": 14, "image_size": 518}
_DINO_L, _DINO_G = (
    _blocks(1024, 24, 16, **_DINO),
    _blocks(1536, 40, 24, use_swiglu_ffn=True, **_DINO),
)
_DINO_IMAGES = _cropped("BitImageProcessor", 256, 224, _IMAGENET)
_CLIP_IMAGES = _cropped("CLIPImageProcessor", 224, 224, _CLIP)
_RESNET_SIZE = {"size": {"shortest_edge": 224}, "crop_pct": 0.875}
_RESNET_IMAGES = _square("ConvNextImageProcessor", 224, _IMAGENET, **_RESNET_SIZE)
_DEIT_IMAGES = _cropped("DeiTImageProcessor", 256, 224, _IMAGENET)

# start of transformers' names, end of the model's, fields, what prepares its images
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "vit-b": ("ViT", _CLASSES, _LABELS, _square("ViTImageProcessor", 224, _PLAIN)),
    "deit-s": ("DeiT", _CLASSES, _DEIT_S | _LABELS, _DEIT_IMAGES),
    "swin-t": ("Swin", _CLASSES, _LABELS, _square("ViTImageProcessor", 224, _IMAGENET)),
    "resnet-50": ("ResNet", _CLASSES, _LABELS, _RESNET_IMAGES),
    "clip-b32": ("CLIP", "Model", _clip_sizes(768, 12, 32, 512), _CLIP_IMAGES),
    "clip-l14": ("CLIP", "Model", _clip_sizes(1024, 24, 14, 768), _CLIP_IMAGES),
    "dinov2-l": ("Dinov2", "Model", _DINO_L, _DINO_IMAGES),
    "dinov2-g": ("Dinov2", "Model", _DINO_G, _DINO_IMAGES),
}


def write_model(name: str, folder: Path) -> Path:
    """Write the folder of one model and return it; an existing one is kept."""
    start, end, fields, images = MODELS[name]
    if (complete := folder / "preprocessor_config.json").exists():
        return folder
    import transformers

    config = getattr(transformers, f"{start}Config")(**fields)
    with torch.device("meta"):
        model = getattr(transformers, f"{start}{end}")(config)
    rng = np.random.default_rng(0)
    drawn = {key: _drawn(rng, key, value) for key, value in model.state_dict().items()}
    model.load_state_dict(drawn, assign=True)
    # It writes the names that published files have, which are not those of its modules.
    model.save_pretrained(folder, max_shard_size="2GB")
    complete.write_text(json.dumps(images, indent=1))
    return folder


def _drawn(rng: np.random.Generator, key: str, like: torch.Tensor) -> torch.Tensor:
    """Draw values of a trained network's size, so that answers differ between images."""
    shape = tuple(like.shape)
    if not like.is_floating_point():  # counts of batches
        return torch.zeros(shape, dtype=like.dtype)
    if key.endswith("running_var"):
        return torch.from_numpy(0.5 + rng.random(shape, dtype=np.float32))
    fixed = next((value for ending, value in _FIXED.items() if key.endswith(ending)), None)
    if fixed is not None:
        return torch.full(shape, fixed)
    noise = torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
    if len(shape) < 2:
        return 0.02 * noise + ("norm" in key and key.endswith("weight"))
    return noise.div_(math.sqrt(math.prod(shape[1:])))
