# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of SPARO: its fork of OpenCLIP, with slots in both towers, and DINO with its read-out
instead of the last block.

Source: SPARO commit 6621a311; Vani et al. 2024, section 3.4; keys of DINO as its vision transformer
        names them.
"""

import math
from typing import Any

from saccade.core.errors import SaccadeError
from saccade.models.official.authors_images import authors_images
from saccade.models.official.conversion import Conversion, Original, Reading
from saccade.models.official.json_files import check_stated, flattened
from saccade.models.official.sources.clip import (
    CLIPJson,
    converted,
    model_json,
    put_slot_order,
    read_out,
    tower_fields,
    tower_shapes,
)
from saccade.models.official.sources.timm import BLOCK
from saccade.models.official.tables import Row, as_rows, as_vector, rows_of
from saccade.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from saccade.models.sparo.config import GATES, SparoConfig

JSON = CLIPJson
READ_OUTS = ("visual.sparo", "text_sparo")
_TIED = "a copy of the keys' projection, with which the values share it"
_EQUATION_2 = "cont:const"  # the type that is assumed without a JSON


def convert(official: Original) -> Conversion:
    """Read a CLIP with slots; without a JSON, type cont:const and exact GELU are assumed.

    Raises: SaccadeError if there is no read-out, or the JSON contradicts the file.
    """
    path, tensors, given = official.path, official.tensors, flattened(official.config)
    for prefix in READ_OUTS:
        if f"{prefix}.q_emb" not in tensors:
            raise SaccadeError(
                f"{path}: has no {prefix}.q_emb, so it is not a CLIP with slots in both towers. "
                "Use SOURCE 'open-clip' for baselines, 'sparo-dino' for DINO."
            )
    json, reading = model_json(official), Reading(path, tensors)
    fields = tower_fields(reading, json, tower_shapes(reading))
    fields |= _slot_fields(reading, "visual.sparo", json)
    queries = [("text_sparo.q_emb", "visual.sparo.q_emb")]
    pairs = [(f"{p}.v.{n}", f"{p}.k.{n}") for p in READ_OUTS for n in ("weight", "bias")]
    fields["share_queries"] = _shares(reading, "share_queries", json.share_queries, queries)
    fields["share_kv"] = _shares(reading, "share_kv", json.share_kv, pairs)
    widths = {reading.size(f"{prefix}.q_emb", -1) for prefix in READ_OUTS}
    values = {reading.shape(f"{prefix}.proj.weight", 2)[1] for prefix in READ_OUTS}
    if len(widths) == 1:
        fields["attn_dim"] = widths.pop()
    if not fields["share_kv"] and len(values) == 1:
        fields["value_dim"] = values.pop()
    usual = {"sparo_type": "sparo_type cont:const (eq. 2)", "quick_gelu": "exact GELU"}
    assumed = [said for field, said in usual.items() if field not in given]
    notes = (f"no JSON said otherwise: {', '.join(assumed)}",) if assumed else ()
    if fields["share_kv"]:
        reading.ignore(r"(visual\.|text_)sparo\.v\.(weight|bias)", _TIED)
    if fields["share_queries"]:
        shared = "a copy of visual.sparo.q_emb, which both towers share"
        reading.ignore(r"text_sparo\.q_emb", shared)
    return converted(official, reading, SparoConfig(**fields), "sparo-clip", notes)


def _slot_fields(reading: Reading, prefix: str, json: CLIPJson) -> dict[str, Any]:
    """Return the fields of a read-out that its shapes tell: L, V, head groups.

    Raises: SaccadeError if its queries or projection have another form, or the JSON differs.
    """
    # (1, heads, slots / heads, 1, width)
    _, heads, group, _, _ = reading.shape(f"{prefix}.q_emb", 5)
    rows, _ = reading.shape(f"{prefix}.proj.weight", 2)
    kind = json.sparo_type or _EQUATION_2
    fields: dict[str, Any] = {
        "pooling": "sparo",
        "slots": heads * group,
        "slot_dim": rows - int(kind.partition(":")[2] in GATES),
        "slot_heads": heads if group > 1 else 0,
        "sparo_type": kind,
    }
    own = {"sparo_heads": heads, "embed_dim": heads * group * fields["slot_dim"]}
    check_stated(reading.path, json, fields | own)
    return fields


def _shares(reading: Reading, name: str, said: bool | None, pairs: list[tuple[str, str]]) -> bool:
    """Return True if the first of each pair is a copy of the second, or missing."""
    if said is False:
        return False
    equal = all(_is_copy(reading, *pair) for pair in pairs if pair[1] in reading.tensors)
    if said and not equal:
        raise SaccadeError(
            f"{reading.path}: --config has {name} true, but {pairs[0][0]} differs from "
            f"{pairs[0][1]}. Pass the JSON of this model."
        )
    return equal


def _is_copy(reading: Reading, copy: str, key: str) -> bool:
    """Return True if a tensor is missing or equal to another."""
    import torch

    first, second = reading.tensors.get(copy), reading.tensors[key]
    if first is None or first is second:
        return True
    return first.shape == second.shape and torch.equal(first, second)


_DINO_NOTES = (
    "keys inferred, no official file seen: DINO's backbone with `sparo.*`",
    "the embedding is the concatenation of the slots, brought to length 1 as k-NN compares it",
)
_HEAD_WIDTH = 64  # of all ViTs that DINO trains
_DINO_ROWS = (
    Row("image.class_token", "cls_token", as_vector),
    Row("image.position", "pos_embed", as_rows),
    Row("image.patches.*", "patch_embed.proj.*"),
    *rows_of("image.blocks.#.", "blocks.#.", BLOCK),
    Row("image_pool.norm.*", "norm.*"),
    *read_out("image_pool", "sparo"),
)


def convert_dino(official: Original) -> Conversion:
    """Read the image tower of one network (teacher or student), without its training head.

    Raises: SaccadeError if the file has no read-out, or is not a ViT for square images.
    """
    prefix = next((p for p in ("backbone.", "") if f"{p}cls_token" in official.tensors), "")
    tensors = {key.removeprefix(prefix): value for key, value in official.tensors.items()}
    heads = {key: key for key in official.tensors if key.startswith("head.")}
    reading = Reading(official.path, tensors, file_keys=heads, prefix=prefix)
    json = model_json(official)
    fields = _slot_fields(reading, "sparo", json)
    width, channels, patch, _ = reading.shape("patch_embed.proj.weight", 4)
    side = math.isqrt(reading.shape("pos_embed", 3)[1] - 1) * patch
    if reading.shape("norm.weight")[0] != width:
        raise SaccadeError(
            f"{official.path}: norm.weight has {reading.size('norm.weight')} values, expected the "
            f"tokens' width {width}: a norm after the slots is not supported."
        )
    reading.shape("sparo.k.weight")
    shared = _is_copy(reading, "sparo.v.weight", "sparo.k.weight")
    # DINO has no temperature for single slots: k-NN normalizes the whole code.
    fields["sparo_type"] = json.sparo_type or "cont:norm"
    config = SparoConfig(
        **fields,
        height_px=side,
        width_px=side,
        channels=channels,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        patch_px=patch,
        patch_bias="patch_embed.proj.bias" in tensors,
        pre_norm=False,
        image_width=width,
        image_layers=reading.depth("blocks.#."),
        image_heads=json.image_heads or max(1, width // _HEAD_WIDTH),
        image_hidden=reading.size("blocks.0.mlp.fc1.weight", default=4 * width),
        eps=1e-6,
        text=False,
        attn_dim=reading.size("sparo.q_emb", -1),
        value_dim=0 if shared else reading.size("sparo.proj.weight", 1),
        share_kv=shared,
    )
    reading.ignore(r"head\..*", "DINO's training head")
    if shared:
        reading.ignore(r"sparo\.v\..*", _TIED)
    reading.take(_DINO_ROWS)
    put_slot_order(reading, config)
    images = authors_images("sparo-dino", config)
    return reading.converted(official, "sparo", config, images, _DINO_NOTES)
