# SPDX-License-Identifier: Apache-2.0
"""Write models of the sizes that people have, with random weights, as a model hub has them.

    pip install -c constraints.txt transformers
    python benchmarks/real_models.py vit-b clip-l14 --out build/real

Each becomes a folder of transformers: config.json, model.safetensors, preprocessor_config.json.
The weights are drawn from a fixed seed.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

_IMAGE = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}
_PLAIN = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_FIXED = {"lambda1": 0.5, "logit_scale": 2.6592}


def _square(kind: str, pixels: int, values: dict[str, Any]) -> dict[str, Any]:
    size = {"height": pixels, "width": pixels}
    return {
        "image_processor_type": kind,
        "size": size,
        "rescale_factor": 1 / 255,
        **_IMAGE,
        **values,
    }


def _cropped(kind: str, edge: int, pixels: int, values: dict[str, Any]) -> dict[str, Any]:
    return {
        **_square(kind, pixels, values),
        "size": {"shortest_edge": edge},
        "do_center_crop": True,
        "crop_size": {"height": pixels, "width": pixels},
    }


def _clip_sizes(width: int, layers: int, patch: int, text: int) -> dict[str, Any]:
    vision = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "patch_size": patch,
        "image_size": 224,
    }
    words = {
        "hidden_size": text,
        "intermediate_size": 4 * text,
        "num_hidden_layers": 12,
        "num_attention_heads": text // 64,
    }
    return {"vision_config": vision, "text_config": words, "projection_dim": text}


_VIT_H = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "patch_size": 14,
}
_DINO_L = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
_GIANT = {
    "hidden_size": 1536,
    "num_hidden_layers": 40,
    "num_attention_heads": 24,
    "use_swiglu_ffn": True,
}
_DEIT_S = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6}
_LABELS = {"num_labels": 1000}
_DINO = _cropped("BitImageProcessor", 256, 224, _IMAGENET)
_CLIP_IMAGES = _cropped("CLIPImageProcessor", 224, 224, _CLIP)

# configuration class, its fields, model class, what prepares its images
MODELS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "vit-b": (
        "ViTConfig",
        _LABELS,
        "ViTForImageClassification",
        _square("ViTImageProcessor", 224, _PLAIN),
    ),
    "deit-s": (
        "DeiTConfig",
        {**_DEIT_S, **_LABELS},
        "DeiTForImageClassification",
        _cropped("DeiTImageProcessor", 256, 224, _IMAGENET),
    ),
    "vit-h": (
        "ViTConfig",
        _VIT_H,
        "ViTModel",
        _square("ViTImageProcessor", 224, _PLAIN),
    ),
    "swin-t": (
        "SwinConfig",
        _LABELS,
        "SwinForImageClassification",
        _square("ViTImageProcessor", 224, _IMAGENET),
    ),
    "resnet-50": (
        "ResNetConfig",
        _LABELS,
        "ResNetForImageClassification",
        {
            **_square("ConvNextImageProcessor", 224, _IMAGENET),
            "size": {"shortest_edge": 224},
            "crop_pct": 0.875,
        },
    ),
    "clip-b32": ("CLIPConfig", _clip_sizes(768, 12, 32, 512), "CLIPModel", _CLIP_IMAGES),
    "clip-l14": ("CLIPConfig", _clip_sizes(1024, 24, 14, 768), "CLIPModel", _CLIP_IMAGES),
    "dinov2-l": (
        "Dinov2Config",
        {**_DINO_L, "patch_size": 14, "image_size": 518},
        "Dinov2Model",
        _DINO,
    ),
    "dinov2-g": (
        "Dinov2Config",
        {**_GIANT, "patch_size": 14, "image_size": 518},
        "Dinov2Model",
        _DINO,
    ),
}


def write_model(name: str, folder: Path) -> Path:
    """Write the folder of one model and return it; an existing one is kept."""
    config_class, fields, model_class, images = MODELS[name]
    if (complete := folder / "preprocessor_config.json").exists():
        return folder
    import transformers

    config = getattr(transformers, config_class)(**fields)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
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


def main() -> None:
    """Write the models that were named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", choices=[*MODELS, "all"])
    parser.add_argument("--out", type=Path, default=Path("build/real"))
    given = parser.parse_args()
    names = list(MODELS) if "all" in given.models else given.models
    for name in names:
        print(write_model(name, given.out / name), flush=True)


if __name__ == "__main__":
    main()
