# SPDX-License-Identifier: Apache-2.0
"""ViT and DeiT checkpoints with timm's or torchvision's names, or with SoT's head."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.models.official.authors_images import authors_images
from saccade.models.official.clip import layer
from saccade.models.official.conversion import Converted, Official, Reading, Row
from saccade.models.official.embeddings import NOTES, embedding_of
from saccade.models.official.sot import converted
from saccade.models.official.sot_head_keys import has_head, read_head
from saccade.models.official.vit_keys import (
    BLOCK,
    POOL,
    SPECIALS,
    activation_of,
    block_fields,
    fold_scales,
    heads_of,
    is_square,
    is_torchvision,
    published_side,
    square_side,
    take_specials,
    timm_reading,
)
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from saccade.models.sot.config import SoTConfig
from saccade.models.sparo.config import Pooling

if TYPE_CHECKING:
    from torch import Tensor

TRUNK = (
    *BLOCK,
    (r"patch_embed\.proj\.(weight|bias)", r"trunk.embed.project.\1"),
    (r"norm\.(weight|bias)", r"trunk.norm.\1"),
)


def convert(official: Official) -> Converted:
    """Read a ViT: LayerNorm epsilon 1e-6, pixels from -1 to 1 (torchvision's: with ImageNet's mean
    and standard deviation), a class token or, as in SigLIP, none.

    Raises: SaccadeError if it has a distillation token.
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

    Without a classifier, as timm's DINOv2, or with an attention pooling, as SigLIP, it becomes an
    embedding of family 'sparo'.
    """
    reading = timm_reading(official)
    fields = trunk_fields(reading, official)
    mean, std = mean[: fields["channels"]], std[: fields["channels"]]
    notes: tuple[str, ...] = ()
    place = next(
        (prefix for prefix in ("classifier.", "head.", "") if has_head(reading, prefix)), None
    )
    pooled = POOL in reading.tensors
    if place is None and (pooled or not any(key.startswith("head.") for key in reading.tensors)):
        return _embedding(official, reading, source, fields | {"mean": mean, "std": std})
    if place is None:
        fields |= _classifier(reading, fields)
    else:
        head, notes = read_head(reading, place, fields["dim"], official.config)
        fields |= head
    config = SoTConfig.from_dict({"mean": mean, "std": std} | fields)
    sizes = {"layers": config.layers, "patch_px": config.patch_px}
    images = authors_images(source, config, **(sizes if source.startswith("torch") else {}))
    return converted(official, reading, config, images, notes)


def trunk_fields(reading: Reading, official: Official) -> dict[str, Any]:
    """Return the fields of the trunk, and take its tensors."""
    dim, channels, side, _ = reading.shape("patch_embed.proj.weight")
    places = reading.shape("pos_embed")[1]
    names = tuple(name for name in SPECIALS if name in reading.tensors)
    if not {"cls_token", "norm.weight"} & {*reading.tensors}:
        reading.shape("cls_token")  # one that averages its tokens before the norm
    registers = reading.shape("reg_token")[1] if "reg_token" in names else 0
    specials = len(names) - 1 + registers if registers else len(names)
    grid = square_side(reading, places - (0 if is_square(places) else specials), "pos_embed")
    # Images may be larger than the whole patches in them.
    published = published_side(official.config)
    side_px = published if published and published // side == grid else grid * side
    reading.rename(TRUNK)
    fold_scales(reading)
    take_specials(reading, names, "pos_embed")
    return block_fields(reading) | {
        "heads": heads_of(reading, official.config, dim),
        "layer_norm_epsilon": 1e-6,
        "patches_only": "cls_token" not in names,
        "distillation": "dist_token" in names,
        "registers": registers,
        "activation": activation_of(reading, official.config),
        "channels": channels,
        "height_px": side_px,
        "width_px": side_px,
        "patch_px": side,
        "remainder": side_px % side > 0,
    }


def _embedding(
    official: Official, reading: Reading, source: str, fields: dict[str, Any]
) -> Converted:
    """Return the class token after the last norm as an embedding, as for transformers' models.

    Without a class token, it is what the attention pooling reads, or the mean of the patches.
    """
    pooling: Pooling = "cls"
    if fields["patches_only"]:
        pooling = "mean"
    if POOL in reading.tensors:
        if not fields["patches_only"] or fields["registers"]:
            raise SaccadeError(
                f"{official.path}: found {POOL} with a class token or registers, expected patches "
                "only, as in SigLIP. Convert another model."
            )
        pooling = "map"
        reading.take(_pool())
        reading.ignore(r"(head|fc_norm)\..+", "the classifier after an attention pooling")
    fusion = "visual" if fields["patches_only"] else "class"
    shape = SoTConfig.from_dict(fields | {"fusion": fusion}).shape
    config = embedding_of(reading, shape, pooling)
    reading.ignore(r"mask_token", "the token of masked patches, used in pretraining only")
    sizes = {"layers": shape.layers, "patch_px": shape.patch_px}
    images = authors_images(source, config, **(sizes if source.startswith("torch") else {}))
    return reading.converted(official, "sparo", config, images, (NOTES[pooling],))


def _pool() -> Iterator[Row]:
    """Yield the rows of timm's AttentionPoolLatent."""
    yield "image_pool.query", POOL, lambda x: x.flatten(0, -2)
    yield from layer("image_pool.q", "attn_pool.q")
    for place, name in enumerate("kv"):
        for leaf in ("weight", "bias"):
            yield f"image_pool.{name}.{leaf}", f"attn_pool.kv.{leaf}", _half(place)
    for ours, theirs in {"out": "proj", "norm_mlp": "norm"}.items():
        yield from layer(f"image_pool.{ours}", f"attn_pool.{theirs}")
    for ours, theirs in {"widen": "fc1", "narrow": "fc2"}.items():
        yield from layer(f"image_pool.{ours}", f"attn_pool.mlp.{theirs}")


def _half(place: int) -> "Callable[[Tensor], Tensor]":
    return lambda x: x.chunk(2)[place]


def _classifier(reading: Reading, trunk: Mapping[str, Any]) -> dict[str, Any]:
    """Take the class token's classifier; the mean of two acts on both tokens side by side.

    Without a class token, it is that of the mean of the patches.
    """
    import torch

    classes, _ = reading.shape("head.weight")
    reading.shape("head.bias")
    if trunk["patches_only"]:
        reading.rename(((r"head\.(weight|bias)", r"head.word_fc.\1"),))
        return {"fusion": "visual", "pooling": "gap", "classes": classes}
    keys = ("head", "head_dist") if trunk["distillation"] else ("head",)
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
