# SPDX-License-Identifier: Apache-2.0
"""The evaluation transforms of the authors' code, each built by the library that they call."""

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import timm.data
import torch
from open_clip.transform import image_transform
from PIL import Image
from timm.models import get_pretrained_cfg
from torchvision import transforms
from torchvision.models import Swin_T_Weights, ViT_B_16_Weights
from torchvision.transforms import InterpolationMode

IMAGENET = {"mean": timm.data.IMAGENET_DEFAULT_MEAN, "std": timm.data.IMAGENET_DEFAULT_STD}
Transform = Callable[[Image.Image], torch.Tensor]


class Pipeline(NamedTuple):
    """One transform by the model's (height, width), and the place that it was read in."""

    make: Callable[[tuple[int, int]], Transform]
    read_in: str


def open_clip(size: tuple[int, int], **options: Any) -> Transform:
    return image_transform(size if size[0] != size[1] else size[0], is_train=False, **options)


def older_open_clip(size: tuple[int, int], **options: Any) -> Transform:
    """OpenCLIP 2.20.0, whose transform.py is SPARO's to the letter."""
    module = _older("open_clip", "transform")
    return module.image_transform(size if size[0] != size[1] else size[0], False, **options)


def resize_and_crop(size: tuple[int, int]) -> Transform:
    """DINO's, DeiT's, Swin's and NAC's lines: 256 pixels for a crop of 224."""
    assert size[0] == size[1]
    return transforms.Compose(
        [
            transforms.Resize(int((256 / 224) * size[0]), interpolation=InterpolationMode.BICUBIC),
            transforms.CenterCrop(size[0]),
            transforms.ToTensor(),
            transforms.Normalize(**IMAGENET),
        ]
    )


def older_timm(size: tuple[int, int]) -> Transform:
    """timm 0.3.4, which SoT's README names; SoT gives the loader nothing but the image's size."""
    config = _older("timm.data", "config").resolve_data_config({"img_size": size[0]}, model=None)
    factory = _older("timm.data", "transforms_factory")
    names = ("input_size", "interpolation", "mean", "std", "crop_pct")
    return factory.create_transform(**{name: config[name] for name in names})


def timm_model(name: str) -> Callable[..., Transform]:
    """timm's transform for one of its own checkpoints, at another size if asked."""

    def make(size: tuple[int, int], **options: Any) -> Transform:
        config = timm.data.resolve_data_config(pretrained_cfg=get_pretrained_cfg(name).to_dict())
        return timm.data.create_transform(**config | {"input_size": (3, *size)} | options)

    return make


def torchvision_model(weights: Any) -> Callable[[tuple[int, int]], Transform]:
    """The transform that torchvision ships with its weights; 224 pixels alone."""

    def make(size: tuple[int, int]) -> Transform:
        preset = weights.transforms()
        share = preset.resize_size[0] / preset.crop_size[0]
        return weights.transforms(crop_size=size[0], resize_size=int(share * size[0]))

    return make


def crop_beyond(size: tuple[int, int]) -> Transform:
    """torchvision where the crop is larger than what the resize left: black around it."""
    return transforms.Compose(
        [
            transforms.Resize(int(0.875 * size[0]), interpolation=InterpolationMode.BICUBIC),
            transforms.CenterCrop(size),
            transforms.ToTensor(),
            transforms.Normalize(**IMAGENET),
        ]
    )


def _older(package: str, module: str) -> types.ModuleType:
    """A module of the packages in `older/`, beside the newer ones of the same name.

    Their __init__ is not run: it imports models that today's torch does not load.
    """
    import importlib

    folder = Path(sys.argv[1]) / Path(*package.split("."))
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_of(package, name)}
    try:
        for depth in range(package.count(".") + 1):
            name = ".".join(package.split(".")[: depth + 1])
            stub = types.ModuleType(name)
            stub.__path__ = [str(Path(sys.argv[1]) / Path(*name.split(".")))]
            sys.modules[name] = stub
        loaded = importlib.import_module(f"{package}.{module}")
    finally:
        for name in list(sys.modules):
            if _is_of(package, name):
                del sys.modules[name]
        sys.modules |= kept
    assert Path(str(loaded.__file__)).parent == folder
    return loaded


def _is_of(package: str, name: str) -> bool:
    top = package.split(".")[0]
    return name == top or name.startswith(f"{top}.")


AUGREG = timm_model("vit_small_patch16_224.augreg_in1k")
# What `saccade convert` reads, by its SOURCE; a second line of a source is another library's.
PIPELINES = {
    "open-clip": Pipeline(
        open_clip,
        "open_clip 3.3.0, open_clip.transform.image_transform(size, is_train=False)",
    ),
    "sparo-clip": Pipeline(
        older_open_clip,
        "ankitkv/sparo-clip 6621a311, src/open_clip/transform.py, the same file as open_clip "
        "2.20.0's, which is run here: image_transform(size, is_train=False)",
    ),
    "sparo-dino": Pipeline(
        resize_and_crop, "facebookresearch/dino 7c446df5, eval_linear.py 66 and eval_knn.py 33"
    ),
    "sot": Pipeline(
        older_timm,
        "jiangtaoxie/SoT 5da3c37e, main.py 328 and 504, no script sets --crop-pct or "
        "--interpolation; timm 0.3.4: resolve_data_config and create_transform, run here",
    ),
    "vit": Pipeline(AUGREG, "timm 1.0.29, vit_small_patch16_224.augreg_in1k"),
    "vit/torchvision": Pipeline(
        torchvision_model(ViT_B_16_Weights.IMAGENET1K_V1),
        "torchvision 0.29.1, ViT_B_16_Weights.IMAGENET1K_V1.transforms()",
    ),
    "deit": Pipeline(
        resize_and_crop,
        "facebookresearch/deit 7e160fe4, datasets.py 101, --eval-crop-ratio 0.875 by default; "
        "int(size / 0.875) and int(256 / 224 * size) are one number for every size up to 1024",
    ),
    "deit/timm": Pipeline(
        timm_model("deit_tiny_patch16_224.fb_in1k"), "timm 1.0.29, deit_tiny_patch16_224.fb_in1k"
    ),
    "swin": Pipeline(
        resize_and_crop,
        "microsoft/Swin-Transformer f82860bf, data/build.py, TEST.CROP true and "
        "DATA.INTERPOLATION bicubic by config.py",
    ),
    "swin/timm": Pipeline(
        timm_model("swin_tiny_patch4_window7_224.ms_in1k"),
        "timm 1.0.29, swin_tiny_patch4_window7_224.ms_in1k",
    ),
    "swin/torchvision": Pipeline(
        torchvision_model(Swin_T_Weights.IMAGENET1K_V1),
        "torchvision 0.29.1, Swin_T_Weights.IMAGENET1K_V1.transforms()",
    ),
    "nac": Pipeline(
        resize_and_crop,
        "mweiss17/NeuralAttentiveCircuits 41ae372a, training/deit/datasets.py 126 to 136",
    ),
}
# Other modes of the same libraries, which a manifest can ask for.
MODES = {
    "open_clip longest": Pipeline(
        lambda size: open_clip(size, resize_mode="longest"),
        "open_clip 3.3.0, resize_mode='longest', fill_color=0",
    ),
    "open_clip longest 127": Pipeline(
        lambda size: open_clip(size, resize_mode="longest", fill_color=127),
        "open_clip 3.3.0, resize_mode='longest', fill_color=127",
    ),
    "open_clip squash": Pipeline(
        lambda size: open_clip(size, resize_mode="squash"),
        "open_clip 3.3.0, resize_mode='squash'",
    ),
    "open_clip squash bilinear": Pipeline(
        lambda size: open_clip(size, resize_mode="squash", interpolation="bilinear"),
        "open_clip 3.3.0, resize_mode='squash', interpolation='bilinear'",
    ),
    "older open_clip longest": Pipeline(
        lambda size: older_open_clip(size, resize_longest_max=True),
        "open_clip 2.20.0, resize_longest_max=True",
    ),
    "timm squash": Pipeline(
        lambda size: AUGREG(size, crop_mode="squash"), "timm 1.0.29, crop_mode='squash'"
    ),
    "timm border": Pipeline(
        lambda size: AUGREG(size, crop_mode="border"),
        "timm 1.0.29, crop_mode='border', fill of the mean",
    ),
    "timm crop 1.0": Pipeline(lambda size: AUGREG(size, crop_pct=1.0), "timm 1.0.29, crop_pct=1.0"),
    "timm lanczos": Pipeline(
        lambda size: AUGREG(size, interpolation="lanczos"), "timm 1.0.29, interpolation='lanczos'"
    ),
    "timm bilinear": Pipeline(
        lambda size: AUGREG(size, interpolation="bilinear"),
        "timm 1.0.29, interpolation='bilinear'",
    ),
    "timm nearest": Pipeline(
        lambda size: AUGREG(size, interpolation="nearest"), "timm 1.0.29, interpolation='nearest'"
    ),
    "torchvision crop beyond": Pipeline(
        crop_beyond, "torchvision 0.29.1, Resize(int(0.875 * size), bicubic), CenterCrop(size)"
    ),
}
