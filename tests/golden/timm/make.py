# SPDX-License-Identifier: Apache-2.0
"""Tiny models of timm with random weights, and what they answer (see README.md here)."""

import argparse
import json
import shutil
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
SIDE, CLASSES = 16, 3
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.5, 0.125)}  # exact in float32
TRUNK = {"img_size": SIDE, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4}
SWIN = {
    "img_size": SIDE,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": (2, 1),
    "num_heads": (1, 2),
    "window_size": 4,
}
# Architecture, arguments, and classes (0: the embedding) by folder.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "siglip": ("vit_base_patch16_siglip_224", TRUNK, 0),
    # A remainder of one pixel beyond the patches, and the tanh approximation of GELU.
    "siglip-tanh": ("vit_so400m_patch16_siglip_256", TRUNK | {"img_size": SIDE + 1}, 0),
    "siglip-gap": ("vit_base_patch16_siglip_gap_224", TRUNK, 0),
    "siglip-classes": ("vit_base_patch16_siglip_gap_224", TRUNK, CLASSES),
    "deit3": ("deit3_small_patch16_224", TRUNK, CLASSES),
    "registers": ("vit_small_patch14_reg4_dinov2", TRUNK, 0),
    "swin": ("swin_tiny_patch4_window7_224", SWIN, 0),
    "swinv2": ("swinv2_tiny_window8_256", SWIN, CLASSES),
    # Windows of 4 in a grid of 8, with offsets as in windows of 3, then one window of 4.
    "swinv2-larger": (
        "swinv2_base_window12to16_192to256",
        SWIN | {"pretrained_window_sizes": (3, 0)},
        CLASSES,
    ),
}


class _Nothing(type):
    """A class whose attributes are their own names, such as InterpolationMode.NEAREST."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _WithoutTorchvision(MetaPathFinder, Loader):
    """Modules of torchvision that have every name: timm imports them, and these models use none."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return a specification for every module of torchvision."""
        inside = name.partition(".")[0] == "torchvision"
        return ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module every name."""

        def named(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Nothing(name, (), {})

        module.__getattr__ = named  # type: ignore[method-assign]


def load_timm() -> Any:
    """Import timm, with stand-ins for the modules of torchvision, which needs another torch."""
    sys.meta_path.insert(0, _WithoutTorchvision())
    import timm

    return timm


def created(timm: Any, name: str) -> torch.nn.Module:
    """Return a model with drawn weights in evaluation."""
    architecture, arguments, classes = MODELS[name]
    model: torch.nn.Module = timm.create_model(architecture, num_classes=classes, **arguments)
    draw(model, list(MODELS).index(name))
    return model.eval()


def draw(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter other numbers; layer scales are powers of two, so folding is exact."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            numbers = 0.3 * torch.randn(parameter.shape, generator=generator)
            if name.endswith("gamma"):
                numbers = 2.0 ** torch.randint(-2, 2, parameter.shape, generator=generator)
            elif "norm" in name and name.endswith("weight"):
                numbers = 1 + numbers
            parameter.copy_(numbers)


def features(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Return the patches after the last norm.

    Shapes: pixels [b c h w] -> [b n d].
    """
    made: torch.Tensor = model.forward_features(pixels)
    if type(model).__name__ == "ResNet":
        return made.flatten(2).mT
    if made.dim() == 4:  # Swin: [b rows columns d]
        return made.flatten(1, 2)
    return made[:, model.num_prefix_tokens :]


def answer(model: Any, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the logits, or the embedding with length 1, and the patches."""
    made = model(pixels)
    if model.num_classes:
        return {"logits": made, "features": features(model, pixels)}
    embedding = torch.nn.functional.normalize(made, dim=-1)
    return {"embedding": embedding, "features": features(model, pixels)}


def saved(timm: Any, model: torch.nn.Module, folder: Path) -> None:
    """Write a folder as timm does for a model hub."""
    shutil.rmtree(folder, ignore_errors=True)
    labels = {"label_names": ["cat", "dog", "eft"]} if model.num_classes else {}
    timm.models.save_for_hf(
        model, folder, model_config=labels, data_config=HALF, safe_serialization=True
    )


def main() -> None:
    """Write a folder per model and answers.npz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE)
    out = parser.parse_args().out
    timm = load_timm()
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, SIDE + 1, SIDE + 1, 3), dtype=np.uint8)
    arrays = {"images": images}
    mean, std = (np.array(HALF[key]) for key in ("mean", "std"))
    pixels = torch.from_numpy((images / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
    for name, (_, arguments, _) in MODELS.items():
        model = created(timm, name)
        saved(timm, model, out / name)
        side = arguments["img_size"]
        with torch.no_grad():
            made = answer(model.double(), pixels[:, :, :side, :side])
        arrays |= {f"{name}/{key}": value.numpy() for key, value in made.items()}
    np.savez_compressed(out / "answers.npz", **arrays)
    versions = {"timm": timm.__version__, "torch": torch.__version__}
    (out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
