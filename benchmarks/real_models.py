# SPDX-License-Identifier: Apache-2.0
"""Write models of the sizes that people have, with random weights, as a model hub has them.

    pip install -c constraints.txt transformers
    python benchmarks/real_models.py vit-b clip-l14 --out build/real

Each becomes a folder of transformers: config.json, model.safetensors, preprocessor_config.json.
The weights are drawn from a fixed seed, tensor by tensor, so that a model of 4.4 GB does not need
its size in memory. transformers only says which tensors a configuration has.
"""

import argparse
import json
import math
from collections.abc import Callable
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
_SHARD_BYTES = 2**31


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
    import transformers
    from safetensors.torch import save_file

    config_class, fields, model_class, images = MODELS[name]
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = getattr(transformers, config_class)(**fields)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    floats = {key for key, value in model.state_dict().items() if value.is_floating_point()}
    rng = np.random.default_rng(0)
    index: dict[str, str] = {}
    for number, keys in enumerate(_shards(shapes)):
        file = "model.safetensors" if not number else f"model-{number}.safetensors"
        shard = {key: _drawn(rng, key, shapes[key], key in floats) for key in keys}
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(keys, file)
    if len(set(index.values())) > 1:
        (folder / "model.safetensors").rename(folder / "model-0.safetensors")
        index = {key: file.replace("model.s", "model-0.s") for key, file in index.items()}
        content = {"metadata": {}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    (folder / "preprocessor_config.json").write_text(json.dumps(images, indent=1))
    config.architectures = [model_class]
    config.save_pretrained(folder)  # last: a folder with it is complete
    return folder


def _shards(shapes: dict[str, tuple[int, ...]]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for key, shape in shapes.items():
        size = 4 * math.prod(shape)
        if held and held + size > _SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(key)
        held += size
    return shards


def _drawn(
    rng: np.random.Generator, key: str, shape: tuple[int, ...], is_float: bool
) -> torch.Tensor:
    """Values of a trained network's order of magnitude, so that answers differ between images."""
    if not is_float:
        # Positions, and counts of batches.
        values = np.arange(math.prod(shape)) if key.endswith("position_ids") else np.zeros(shape)
        return torch.from_numpy(np.ascontiguousarray(values.reshape(shape), dtype=np.int64))
    fan_in = math.prod(shape[1:]) if len(shape) > 1 else 1
    rules: dict[str, Callable[[], Any]] = {
        "running_var": lambda: 0.5 + rng.random(shape, dtype=np.float32),
        "lambda1": lambda: np.full(shape, 0.5, np.float32),
        "logit_scale": lambda: np.full(shape, 2.6592, np.float32),
    }
    for ending, rule in rules.items():
        if key.endswith(ending):
            return torch.from_numpy(np.ascontiguousarray(rule(), dtype=np.float32))
    noise = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) < 2:
        scale = "norm" in key and key.endswith("weight")
        return torch.from_numpy(np.asarray(0.02 * noise + (1 if scale else 0), dtype=np.float32))
    noise *= 1 / math.sqrt(fan_in)
    return torch.from_numpy(noise)


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
