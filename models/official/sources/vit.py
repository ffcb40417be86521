# SPDX-License-Identifier: Apache-2.0
"""ViT and DeiT checkpoints with timm's or torchvision's names, or with SoT's head."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count
from saccade.models.official.authors_images import PreprocessCfg, PretrainedCfg, authors_images
from saccade.models.official.conversion import Conversion, Original, Reading
from saccade.models.official.json_files import declared
from saccade.models.official.sources.sot import HeadJson, head_place, read_head
from saccade.models.official.sources.timm import (
    VIT_BLOCKS,
    block_fields,
    classifier,
    embedding,
    is_square,
    is_torchvision,
    published_side,
    timm_reading,
    token_rows,
)
from saccade.models.official.tables import Row, as_rows, part, rows_of, scaled
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from saccade.models.sot.config import SoTConfig
from saccade.models.sparo.config import Pooling
from saccade.models.trunks import Activation

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ViTArguments:
    """Arguments of timm's ViT."""

    num_heads: Count | None = None
    act_layer: Activation | None = None


@dataclass(frozen=True)
class TimmJson(HeadJson):
    """What is read of the config.json of timm, or of the JSON that a user writes instead."""

    WRITTEN: ClassVar = ("num_heads", "img_size", "representationConfig", "pretrained_cfg")
    # Arguments of timm's models, which their tensors tell.
    UNREAD: ClassVar = (
        *("patch_size", "in_chans", "num_classes", "embed_dim", "depth", "depths", "num_heads"),
        *("mlp_ratio", "qkv_bias", "window_size", "drop_rate", "drop_path_rate", "img_size"),
        *("num_features", "global_pool", "label_names"),
    )
    architecture: str | None = None
    model_args: dict[str, Any] | None = None
    pretrained_cfg: PretrainedCfg = field(default_factory=PretrainedCfg)
    # Of OpenCLIP, whose towers may be timm's.
    preprocess_cfg: PreprocessCfg = field(default_factory=PreprocessCfg)


@dataclass(frozen=True)
class ViTJson(TimmJson):
    """The same of a ViT."""

    num_heads: Count | None = None


JSON = ViTJson
_HALF = (0.5, 0.5, 0.5)
SPECIALS = ("cls_token", "dist_token", "reg_token")  # timm's tokens before the patches
POOL = "attn_pool.latent"  # the query of timm's attention pooling
# DeiT III's factors of a block's outputs, by timm's names and the authors'.
_SCALES = {"attention.out": ("attn.proj", "ls1.gamma"), "narrow": ("mlp.fc2", "ls2.gamma")}
_FACTORS = {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}
_TRUNK = (
    *(
        Row(f"trunk.blocks.#.{ours}.*", (f"blocks.#.{theirs}.*", f"blocks.#.{name}"), scaled)
        for ours, (theirs, factor) in _SCALES.items()
        for name in (factor, _FACTORS[factor])
    ),
    *VIT_BLOCKS,
    Row("trunk.embed.project.*", "patch_embed.proj.*"),
    Row("trunk.norm.*", "norm.*"),
)
# timm's AttentionPoolLatent.
_POOL = (
    Row("image_pool.query", POOL, as_rows),
    Row("image_pool.q.*", "attn_pool.q.*"),
    *(Row(f"image_pool.{name}.*", "attn_pool.kv.*", part(i, 2)) for i, name in enumerate("kv")),
    *rows_of(
        "image_pool.",
        "attn_pool.",
        {
            "out.*": "proj.*",
            "norm_mlp.*": "norm.*",
            "widen.*": "mlp.fc1.*",
            "narrow.*": "mlp.fc2.*",
        },
    ),
)


def mean_weight(first: "Tensor", second: "Tensor") -> "Tensor":
    """Return the weight of the mean of two classifiers, which read tokens side by side."""
    import torch

    return torch.cat((first, second), 1) / 2


def mean_bias(first: "Tensor", second: "Tensor") -> "Tensor":
    """Return the bias of that mean."""
    return (first + second) / 2


def convert(official: Original) -> Conversion:
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
    if is_torchvision(official):
        return convert_vit(official, "torchvision vit", IMAGENET_MEAN, IMAGENET_STD)
    return convert_vit(official, "vit", _HALF, _HALF)


def convert_deit(official: Original) -> Conversion:
    """Read a DeiT: a ViT with ImageNet's mean and standard deviation.

    A distilled DeiT returns the mean of its two classifiers, as in its authors' evaluation.
    Raises: SaccadeError if the file is not a DeiT.
    Source: Touvron et al. 2020, and timm's names of its tensors.
    """
    return convert_vit(official, "deit", IMAGENET_MEAN, IMAGENET_STD)


def convert_vit(
    official: Original, source: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> Conversion:
    """Read a ViT or DeiT, with the preprocessing of that source's authors.

    Without a classifier, as timm's DINOv2, or with an attention pooling, as SigLIP, it becomes an
    embedding of family 'sparo'.
    """
    reading = timm_reading(official)
    json = declared(ViTJson, official.config)
    names = tuple(name for name in SPECIALS if name in reading.tensors)
    fields = _fields(reading, official, json, names)
    channels = fields["channels"]
    fields |= {"mean": mean[:channels], "std": std[:channels]}
    registers = fields["registers"]
    rows = (*_TRUNK, *token_rows(names, "pos_embed", _count(names, registers)))
    place, pooled = head_place(reading), POOL in reading.tensors
    if place is None and (pooled or not any(key.startswith("head.") for key in reading.tensors)):
        pooling = _pooling(official, reading, fields)
        fusion = "visual" if fields["patches_only"] else "class"
        shape = SoTConfig.from_dict(fields | {"fusion": fusion}).shape
        reading.ignore(r"mask_token", "the token of masked patches, used in pretraining only")
        return embedding(official, reading, shape, (*rows, *_POOL), source, pooling)
    notes: tuple[str, ...] = ()
    if place is None:
        fields |= _classifier(reading, fields)
    else:
        head, notes = read_head(reading, place, fields["dim"], json)
        fields |= head
    reading.take(rows)
    config = SoTConfig.from_dict(fields)
    images = authors_images(source, config, layers=config.layers, patch_px=config.patch_px)
    return classifier(official, reading, config, images, notes)


def _count(names: tuple[str, ...], registers: int) -> int:
    return len(names) - 1 + registers if registers else len(names)


def _fields(
    reading: Reading, official: Original, json: ViTJson, names: tuple[str, ...]
) -> dict[str, Any]:
    """Return the fields of the trunk; `names` are those of the tokens before the patches."""
    dim, channels, side, _ = reading.shape("patch_embed.proj.weight", 4)
    places = reading.shape("pos_embed", 3)[1]
    if not {"cls_token", "norm.weight"} & {*reading.tensors}:
        reading.shape("cls_token")  # one that averages its tokens before the norm
    registers = reading.shape("reg_token", 3)[1] if "reg_token" in names else 0
    count = places - (0 if is_square(places) else _count(names, registers))
    grid = round(max(count, 0) ** 0.5)
    if grid * grid != count:
        raise SaccadeError(
            f"{reading.path}: pos_embed is for {count} tokens, which do not form a square grid. "
            "Expected the positions of a square image."
        )
    # Images may be larger than the whole patches in them.
    published = published_side(official.config)
    side_px = published if published and published // side == grid else grid * side
    return block_fields(reading) | {
        "heads": _heads(reading, json, dim),
        "layer_norm_epsilon": 1e-6,
        "patches_only": "cls_token" not in names,
        "distillation": "dist_token" in names,
        "registers": registers,
        "activation": _activation(json),
        "channels": channels,
        "height_px": side_px,
        "width_px": side_px,
        "patch_px": side,
        "remainder": side_px % side > 0,
    }


_HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1152: 16}  # by width


def _heads(reading: Reading, json: ViTJson, dim: int) -> int:
    """Return the number of heads: from --config, else as in the usual sizes of this width.

    Raises: SaccadeError if neither tells it.
    """
    own = declared(ViTArguments, json.model_args, "--config: model_args")
    heads = json.num_heads or own.num_heads or _HEADS.get(dim)
    if heads is None:
        raise SaccadeError(
            f"{reading.path}: tokens have width {dim}, and the number of heads is not in the file. "
            'Pass it with --config, a JSON file such as {"num_heads": 4}.'
        )
    return heads


# timm's SigLIPs with the activation that the authors used for all; timm has GELU in the others.
_TANH = re.compile(
    r"vit_(base_patch32|so400m_patch16|giantopt_patch16)_siglip_.+"
    r"|vit_large_patch16_siglip_(gap_)?512"
)


def _activation(json: ViTJson) -> str:
    """Return the activation that timm uses in the model that the JSON names, if it names one."""
    name = (json.architecture or "").partition(".")[0]
    usual = "gelu_tanh" if _TANH.fullmatch(name) else "gelu"
    own = declared(ViTArguments, json.model_args, "--config: model_args")
    return own.act_layer or usual


def _pooling(official: Original, reading: Reading, fields: Mapping[str, Any]) -> Pooling:
    """Return how the tokens become an embedding, as for transformers' models.

    It is the class token after the last norm; without one, what the attention pooling reads, or
    the mean of the patches.
    Raises: SaccadeError if there is such a pooling beside a class token.
    """
    if POOL not in reading.tensors:
        return "mean" if fields["patches_only"] else "cls"
    if not fields["patches_only"] or fields["registers"]:
        raise SaccadeError(
            f"{official.path}: found {POOL} with a class token or registers, expected patches "
            "only, as in SigLIP. Convert another model."
        )
    reading.ignore(r"(head|fc_norm)\..+", "the classifier after an attention pooling")
    return "map"


def _classifier(reading: Reading, trunk: Mapping[str, Any]) -> dict[str, Any]:
    """Take the class token's classifier; the mean of two acts on both tokens side by side.

    Without a class token, it is that of the mean of the patches.
    """
    classes, _ = reading.shape("head.weight", 2)
    if trunk["patches_only"]:
        reading.take((Row("head.word_fc.*", "head.*"),))
        return {"fusion": "visual", "pooling": "gap", "classes": classes}
    if trunk["distillation"]:
        keys = ("head.weight", "head_dist.weight"), ("head.bias", "head_dist.bias")
        reading.take((Row("head.class_fc.weight", keys[0], mean_weight),))
        reading.take((Row("head.class_fc.bias", keys[1], mean_bias),))
    else:
        reading.take((Row("head.class_fc.*", "head.*"),))
    fields: dict[str, Any] = {"fusion": "class", "classes": classes}
    if "pre_logits.fc.weight" in reading.tensors:
        reading.take((Row("head.class_projection.*", "pre_logits.fc.*"),))
        projected = reading.shape("pre_logits.fc.weight")[0]
        fields |= {"class_projection": projected, "class_activation": "tanh"}
    return fields
