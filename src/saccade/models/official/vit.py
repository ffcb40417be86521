# SPDX-License-Identifier: Apache-2.0
"""ViT and DeiT checkpoints with timm's or torchvision's names, or with SoT's head."""

from typing import Any

from saccade.errors import SaccadeError
from saccade.models.official.authors_images import authors_images
from saccade.models.official.conversion import Converted, Official, Reading
from saccade.models.official.sot import converted
from saccade.models.official.sot_head_keys import has_head, read_head
from saccade.models.official.vit_keys import (
    BLOCK,
    block_fields,
    fold_scales,
    heads_of,
    is_square,
    is_torchvision,
    square_side,
    take_specials,
    timm_reading,
)
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from saccade.models.sot.config import SoTConfig
from saccade.models.sparo.config import SparoConfig
from saccade.models.sparo.trunk import TRUNK as SPARO_TRUNK
from saccade.models.trunks import PretrainedTrunk

TRUNK = (
    *BLOCK,
    (r"patch_embed\.proj\.(weight|bias)", r"trunk.embed.project.\1"),
    (r"norm\.(weight|bias)", r"trunk.norm.\1"),
)


def convert(official: Official) -> Converted:
    """Read a ViT: LayerNorm epsilon 1e-6, a class token, pixels from -1 to 1 (torchvision's:
    with ImageNet's mean and standard deviation).

    Raises: SaccadeError if it has a distillation token, or no class token.
    Source: timm's and torchvision's vision_transformer; `pre_logits` is the tanh layer of the
            models of ImageNet-21k.
    """
    if "dist_token" in {*official.tensors, *(official.backbone or ())}:
        raise SaccadeError(
            f"{official.path}: has a distillation token, which needs SOURCE 'deit'. "
            "Run: saccade convert deit ..."
        )
    if is_torchvision({*official.tensors, *(official.backbone or ())}):
        return convert_vit(official, "torchvision vit", IMAGENET_MEAN, IMAGENET_STD)
    return convert_vit(official, "vit", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def convert_deit(official: Official) -> Converted:
    """Read a DeiT: a ViT with ImageNet's mean and standard deviation.

    A distilled DeiT returns the mean of its two classifiers, as in its authors' evaluation.
    Raises: SaccadeError if the file is not a DeiT.
    Source: Touvron et al. 2020, and timm's names of its tensors.
    """
    return convert_vit(official, "deit", IMAGENET_MEAN, IMAGENET_STD)


def convert_vit(
    official: Official, source: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> Converted:
    """Read a ViT or DeiT, with the preprocessing of that source's authors.

    Without a classifier, as timm's DINOv2, it becomes an embedding of family 'sparo'.
    """
    reading = timm_reading(official)
    fields = trunk_fields(reading, official)
    mean, std = mean[: fields["channels"]], std[: fields["channels"]]
    notes: tuple[str, ...] = ()
    place = next(
        (prefix for prefix in ("classifier.", "head.", "") if has_head(reading, prefix)), None
    )
    if place is None and not any(key.startswith("head.") for key in reading.tensors):
        return _embedding(official, reading, source, fields | {"mean": mean, "std": std})
    if place is None:
        fields |= _classifier(reading, distilled=fields["distillation"])
    else:
        head, notes = read_head(reading, place, fields["dim"], official.config)
        fields |= head
    config = SoTConfig.from_dict({"mean": mean, "std": std} | fields)
    sizes = {"layers": config.layers, "patch_px": config.patch_px}
    images = authors_images(source, config, **(sizes if source.startswith("torch") else {}))
    return converted(official, reading, config, images, notes)


def trunk_fields(reading: Reading, official: Official) -> dict[str, Any]:
    """Return the fields of the trunk, and take its tensors."""
    distilled = "dist_token" in reading.tensors
    dim, channels, side, _ = reading.shape("patch_embed.proj.weight")
    reading.shape("cls_token")
    names = ("cls_token", *["dist_token"] * distilled)
    registers = reading.shape("reg_token")[1] if "reg_token" in reading.tensors else 0
    names += ("reg_token",) if registers else ()
    specials = 1 + distilled + registers
    places = reading.shape("pos_embed")[1]
    grid = square_side(reading, places - (0 if is_square(places) else specials), "pos_embed")
    reading.rename(TRUNK)
    fold_scales(reading)
    take_specials(reading, names, "pos_embed")
    return block_fields(reading) | {
        "heads": heads_of(reading, official.config, dim),
        "layer_norm_epsilon": 1e-6,
        "distillation": distilled,
        "registers": registers,
        "channels": channels,
        "height_px": grid * side,
        "width_px": grid * side,
        "patch_px": side,
    }


def _embedding(
    official: Official, reading: Reading, source: str, fields: dict[str, Any]
) -> Converted:
    """Return the class token after the last norm as an embedding, as for transformers' models."""
    import torch

    shape = SoTConfig.from_dict(fields | {"fusion": "class"}).shape
    trunk = {name.removeprefix("trunk."): value for name, value in reading.weights.items()}
    config = SparoConfig(
        **SPARO_TRUNK.fields(shape), text=False, pooling="cls", embed_dim=shape.dim
    )
    state = SPARO_TRUNK.state(PretrainedTrunk(shape, trunk), config)
    origin = {value.data_ptr(): reading.names[name] for name, value in reading.weights.items()}
    reading.weights, reading.names = {}, {}
    for name, value in state.items():
        reading.weights[name] = value
        reading.names[name] = origin.get(value.data_ptr(), "cls_token, reg_token")
    reading.put("image_pool.project.weight", torch.eye(shape.dim))
    reading.ignore(r"mask_token", "the token of masked patches, used in pretraining only")
    sizes = {"layers": shape.layers, "patch_px": shape.patch_px}
    images = authors_images(source, config, **(sizes if source.startswith("torch") else {}))
    notes = ("no classifier: the embedding is the class token, brought to length 1",)
    return reading.converted(official, "sparo", config, images, notes)


def _classifier(reading: Reading, *, distilled: bool) -> dict[str, Any]:
    """Take the class token's classifier; the mean of two acts on both tokens side by side."""
    import torch

    classes, _ = reading.shape("head.weight")
    reading.shape("head.bias")
    keys = ("head", "head_dist") if distilled else ("head",)
    weights = [reading.tensors[f"{key}.weight"] / len(keys) for key in keys]
    biases = [reading.tensors[f"{key}.bias"] / len(keys) for key in keys]
    reading.put("head.class_fc.weight", torch.cat(weights, 1), *(f"{key}.weight" for key in keys))
    reading.put("head.class_fc.bias", torch.stack(biases).sum(0), *(f"{key}.bias" for key in keys))
    fields: dict[str, Any] = {"fusion": "class", "classes": classes}
    if "pre_logits.fc.weight" in reading.tensors:
        reading.rename(((r"pre_logits\.fc\.(weight|bias)", r"head.class_projection.\1"),))
        projected = reading.shape("pre_logits.fc.weight")[0]
        fields |= {"class_projection": projected, "class_activation": "tanh"}
    return fields
