# SPDX-License-Identifier: Apache-2.0
"""Swin and Swin V2 with the names of the authors, timm or transformers; Swin also with
torchvision's, or with SoT's head.

Source: Liu et al. 2021 and 2022; modeling_swin.py and modeling_swinv2.py of transformers 4.57 and
        5.23. There, the norms of the patches and of the mergings have epsilon 1e-5 whatever
        layer_norm_eps is.
"""

import re
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from saccade.core.errors import Damaged, SaccadeError
from saccade.core.schema import Count, Natural, Range
from saccade.models.official.authors_images import authors_images
from saccade.models.official.conversion import Conversion, Original, Reading
from saccade.models.official.json_files import declared
from saccade.models.official.sources.hugging_face import (
    LAYERS,
    QKV,
    ModelJson,
    architecture_of,
    images_of,
    labels_of,
)
from saccade.models.official.sources.sot import head_place, imagenet, read_head
from saccade.models.official.sources.timm import (
    BLOCK,
    classifier,
    embedding,
    is_torchvision,
    published_side,
    timm_reading,
)
from saccade.models.official.sources.vit import TimmJson
from saccade.models.official.tables import Row, Rows, joined, rows_of, without_key
from saccade.models.sot.config import SoTConfig

_BLOCK = "trunk.stages.#.#."
_THEIRS = "layers.#.blocks.#."
_TRUNK = (
    Row("trunk.embed.*", "patch_embed.proj.*"),
    Row("trunk.embed_norm.*", "patch_embed.norm.*"),
    Row("trunk.norm.*", "norm.*"),
    *rows_of(_BLOCK, _THEIRS, BLOCK),
    Row(f"{_BLOCK}attention.relative", f"{_THEIRS}attn.relative_position_bias_table"),
    # Of a Swin V2.
    Row(f"{_BLOCK}attention.log_scale", f"{_THEIRS}attn.logit_scale"),
    Row(f"{_BLOCK}attention.position_bias.#.*", f"{_THEIRS}attn.cpb_mlp.#.*"),
    Row(
        f"{_BLOCK}attention.qkv.bias",
        (f"{_THEIRS}attn.q_bias", f"{_THEIRS}attn.v_bias"),
        without_key,
    ),
)
_COMPUTED = "recomputed from the window and the image size"
_FIRST = "layers.0.blocks.0.attn"
_LOG_SCALE = f"{_FIRST}.logit_scale"  # only a Swin V2 has it


@dataclass(frozen=True)
class SwinJson(TimmJson):
    """What is read of the JSON of a Swin."""

    img_size: Count | None = None


@dataclass(frozen=True)
class SwinArguments:
    """Arguments of timm's Swin V2."""

    window_size: Count | None = None
    pretrained_window_sizes: tuple[Natural, ...] | None = None


JSON = SwinJson


def convert(official: Original) -> Conversion:
    """Read a Swin, whose tokens are averaged and classified, or pooled by SoT's head.

    Without a classifier, it becomes an embedding of family 'sparo'.

    The image is 224 pixels wide (384 with windows of 12; of a Swin V2, 256) unless --config has
    {"img_size": ...}. The windows of a Swin V2 are in its name.

    Raises: SaccadeError if the file is not a Swin.
    """
    reading, json = timm_reading(official), declared(SwinJson, official.config)
    fields = _fields(reading, official, json)
    reading.ignore(r".*\.(relative_position_index|relative_coords_table|attn_mask)", _COMPUTED)
    # At the end of a stage; in later releases of timm at the start of the next.
    later = not any(key.startswith("layers.0.downsample.") for key in reading.tensors)
    merging = f"layers.{'#+1' if later else '#'}.downsample."
    names = {"norm.*": "norm.*", "reduce.*": "reduction.*"}
    rows = (*_TRUNK, *rows_of("trunk.mergings.#.", merging, names))
    head: dict[str, Any] = {"pooling": "gap", "classes": 1}
    notes: tuple[str, ...] = ()
    place = head_place(reading)
    if place is not None:
        width = fields["dim"] * 2 ** (len(fields["stage_layers"]) - 1)
        head, notes = read_head(reading, place, width, json)
    elif not any(key.startswith("head.") for key in reading.tensors):
        shape = imagenet(fields | head | {"fusion": "visual"}).shape
        return embedding(official, reading, shape, rows, "swin")
    else:
        # Later releases of timm have the classifier one level deeper.
        key = "head.fc" if "head.fc.weight" in reading.tensors else "head"
        head["classes"] = reading.shape(f"{key}.weight")[0]
        rows += (Row("head.word_fc.*", f"{key}.*"),)
    reading.take(rows)
    config = imagenet(fields | head | {"fusion": "visual"})
    images = authors_images("swin", config)
    if is_torchvision(official):
        sizes = {"dim": config.dim, "layers": sum(config.stage_layers)}
        images = authors_images("torchvision swin", config, **sizes)
    return classifier(official, reading, config, images, notes)


def _fields(reading: Reading, official: Original, json: SwinJson) -> dict[str, Any]:
    """Return the fields of the trunk."""
    dim, channels, patch, _ = reading.shape("patch_embed.proj.weight", 4)
    second = _LOG_SCALE in reading.tensors
    windows = windows_of(official.path, json) if second else {"window": _window(reading)}
    usual = 256 if second else 384 if windows["window"] == 12 else 224
    side = json.img_size or published_side(official.config) or usual
    stages = range(reading.depth("layers.#.blocks."))
    heads = "logit_scale" if second else "relative_position_bias_table"
    biases = [f"layers.{stage}.blocks.0.attn.{heads}" for stage in stages]
    return windows | {
        "trunk": "swinv2" if second else "swin",
        "dim": dim,
        "channels": channels,
        "patch_px": patch,
        "height_px": side,
        "width_px": side,
        "stage_layers": [reading.depth(f"layers.{stage}.blocks.#.") for stage in stages],
        "stage_heads": [reading.shape(key)[0 if second else 1] for key in biases],
        "qkv_bias": f"{_FIRST}.{'q_bias' if second else 'qkv.bias'}" in reading.tensors,
    }


def _window(reading: Reading) -> int:
    """Return the window of a Swin, which the table of its biases tells."""
    name = "relative_position_bias_table"
    offsets, _ = reading.shape(f"{_FIRST}.{name}", 2)
    window = (round(offsets**0.5) + 1) // 2
    if (2 * window - 1) ** 2 != offsets:
        why = f"{name} has {offsets} rows, expected the square of an odd number"
        raise Damaged(reading.path, why)
    return window


def windows_of(path: str, json: TimmJson) -> dict[str, Any]:
    """Return the window of a Swin V2, and those before it was fine-tuned; its tensors tell neither.

    They are in timm's name of the model (window8, or window12to16), unless its arguments differ.
    Raises: SaccadeError if the JSON has no such name.
    """
    own = declared(SwinArguments, json.model_args, "--config: model_args")
    if own.window_size is not None:
        trained = own.pretrained_window_sizes or ()
        return {"window": own.window_size, "trained_windows": trained if any(trained) else ()}
    match = re.search(r"_window(\d+)(?:to(\d+))?(?:_|$)", json.architecture or "")
    if match is None:
        raise SaccadeError(
            f"{path}: the tensors of a Swin V2 do not tell its windows. Pass the name of "
            'the model with --config, such as {"architecture": "swinv2_tiny_window8_256"}.'
        )
    first, later = int(match[1]), int(match[2] or match[1])
    if later == first:
        return {"window": first}
    # All of the authors' models had windows of half the size in the last of four stages.
    return {"window": later, "trained_windows": [first, first, first, first // 2]}


@dataclass(frozen=True)
class TransformersSwin(ModelJson):
    """The configuration of transformers."""

    patch_size: tuple[Count, Count] = (4, 4)
    embed_dim: Count = 96
    depths: tuple[Count, ...] = (2, 2, 6, 2)
    num_heads: tuple[Count, ...] = (3, 6, 12, 24)
    window_size: Count = 7
    mlp_ratio: Annotated[float, Range(4, 4)] = 4.0
    qkv_bias: bool = True
    hidden_act: Literal["gelu"] = "gelu"
    use_absolute_embeddings: Literal[False] = False
    layer_norm_eps: Annotated[float, Range(1e-5, 1e-5)] = 1e-5
    # Of a Swin V2, before it was fine-tuned with larger ones; 0 means none.
    pretrained_window_sizes: tuple[Natural, ...] | None = None


def convert_transformers(official: Original) -> Conversion:
    """Read a Swin of transformers, whose tokens are averaged and classified.

    Raises: SaccadeError if an option of its configuration is not supported.
    """
    architecture_of(official, ("SwinForImageClassification", "Swinv2ForImageClassification"))
    json = declared(TransformersSwin, official.config, f"{official.path}: config.json")
    second, trained = json.model_type == "swinv2", json.pretrained_window_sizes or ()
    images, fields = images_of(official, json)
    reading = Reading(official.path, official.tensors)
    config = SoTConfig(
        **fields,
        trunk=json.model_type,  # type: ignore[arg-type]
        dim=json.embed_dim,
        stage_layers=json.depths,
        stage_heads=json.num_heads,
        window=json.window_size,
        trained_windows=trained if second and any(trained) else (),
        qkv_bias=json.qkv_bias,
        layer_norm_epsilon=json.layer_norm_eps,
        pooling="gap",
        fusion="visual",
        classes=reading.shape("classifier.weight")[0],
    )
    reading.ignore(r".*\.relative_(position_index|coords_table)", _COMPUTED)
    reading.ignore(r"swin(v2)?\.embeddings\.mask_token", "the token of masked patches")
    reading.take(_transformers_rows(json.model_type))
    official = replace(official, labels=labels_of(official, config.classes))
    return reading.converted(official, "sot", config, images)


def _transformers_rows(whole: str) -> Rows:
    block = f"{whole}.encoder.layers.#.blocks.#."
    attention, mine = f"{block}attention.self.", f"{_BLOCK}attention."
    biases = (f"{attention}query.bias", f"{attention}value.bias")
    own = (Row(f"{mine}qkv.bias", biases, without_key),) if whole == "swinv2" else ()
    queries = tuple(f"{attention}{name}.*" for name in QKV)
    merging = f"{whole}.encoder.layers.#.downsample."
    return (
        Row("trunk.embed.*", f"{whole}.embeddings.patch_embeddings.projection.*"),
        Row("trunk.embed_norm.*", f"{whole}.embeddings.norm.*"),
        Row(f"{mine}qkv.*", queries, joined),
        *own,
        Row(f"{mine}relative", f"{attention}relative_position_bias_table"),
        Row(f"{mine}log_scale", f"{attention}logit_scale"),
        Row(f"{mine}position_bias.#.*", f"{attention}continuous_position_bias_mlp.#.*"),
        *rows_of(_BLOCK, block, LAYERS),
        Row("trunk.mergings.#.norm.*", f"{merging}norm.*"),
        Row("trunk.mergings.#.reduce.*", f"{merging}reduction.*"),
        Row("trunk.norm.*", f"{whole}.layernorm.*"),
        Row("head.word_fc.*", "classifier.*"),
    )
