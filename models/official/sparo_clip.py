# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of SPARO's fork of OpenCLIP: slots in both towers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.models.official.clip import TIED, Shapes, clip_config, is_copy, model_json
from saccade.models.official.conversion import Converted, Official
from saccade.models.official.given_files import check_stated
from saccade.models.official.open_clip import converted
from saccade.models.sparo.config import GATES

if TYPE_CHECKING:
    from torch import Tensor

READ_OUTS = ("visual.sparo", "text_sparo")


def convert(official: Official) -> Converted:
    """Read a CLIP with slots; without a JSON, type cont:const and exact GELU are assumed.

    Raises: SaccadeError if there is no read-out, or the JSON contradicts the file.
    Source: SPARO commit 6621a311.
    """
    path, tensors = official.path, official.tensors
    for prefix in READ_OUTS:
        if f"{prefix}.q_emb" not in tensors:
            raise SaccadeError(
                f"{path}: has no {prefix}.q_emb, so it is not a CLIP with slots in both towers. "
                "Use SOURCE 'open-clip' for baselines, 'sparo-dino' for DINO."
            )
    json = model_json(path, official.config)
    shapes = Shapes(path, tensors)
    fields = slot_fields(path, tensors, "visual.sparo", json)
    fields["share_queries"] = _shares(
        path, tensors, "share_queries", json, [("text_sparo.q_emb", "visual.sparo.q_emb")]
    )
    pairs = [(f"{p}.v.{n}", f"{p}.k.{n}") for p in READ_OUTS for n in ("weight", "bias")]
    fields["share_kv"] = _shares(path, tensors, "share_kv", json, pairs)
    widths = {tensors[f"{prefix}.q_emb"].shape[-1] for prefix in READ_OUTS}
    values = {tensors[f"{prefix}.proj.weight"].shape[1] for prefix in READ_OUTS}
    if len(widths) == 1:
        fields["attn_dim"] = widths.pop()
    if not fields["share_kv"] and len(values) == 1:
        fields["value_dim"] = values.pop()
    notes: tuple[str, ...] = ()
    usual = {"sparo_type": "sparo_type cont:const (eq. 2)", "quick_gelu": "exact GELU"}
    if assumed := [said for field, said in usual.items() if field not in json]:
        notes = (f"no JSON said otherwise: {', '.join(assumed)}",)
    config = clip_config(shapes, json, fields)
    result = converted(official, config, shapes.text, notes, source="sparo-clip")
    tied = {copy: TIED for copy, _ in pairs if fields["share_kv"] and copy in tensors}
    if fields["share_queries"] and "text_sparo.q_emb" in tensors:
        tied["text_sparo.q_emb"] = "a copy of visual.sparo.q_emb, which both towers share"
    return replace(result, ignored={**result.ignored, **tied})


def slot_fields(
    path: str, tensors: "Mapping[str, Tensor]", prefix: str, json: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a read-out that its shapes tell: L, V, head groups.

    Raises: SaccadeError if its queries or projection have another form, or the JSON differs.
    """
    query, projection = tensors[f"{prefix}.q_emb"], tensors.get(f"{prefix}.proj.weight")
    if query.dim() != 5 or projection is None:
        raise SaccadeError(
            f"{path}: {prefix}.q_emb has shape {tuple(query.shape)}, expected (1, heads, "
            f"slots / heads, 1, width) and {prefix}.proj.weight. Pass a checkpoint of SPARO."
        )
    kind = json.get("sparo_type", "cont:const")
    heads, group = query.shape[1], query.shape[2]
    fields = {
        "pooling": "sparo",
        "slots": heads * group,
        "slot_dim": projection.shape[0] - int(kind.partition(":")[2] in GATES),
        "slot_heads": heads if group > 1 else 0,
        "sparo_type": kind,
    }
    stated = {
        "L": (json.get("L"), fields["slots"]),
        f"V (with sparo_type {kind})": (json.get("V"), fields["slot_dim"]),
        "sparo_heads": (json.get("sparo_heads"), heads),
        "embed_dim": (json.get("embed_dim"), fields["slots"] * fields["slot_dim"]),
    }
    check_stated(path, stated)
    return fields


def _shares(
    path: str,
    tensors: "Mapping[str, Tensor]",
    name: str,
    json: Mapping[str, Any],
    pairs: list[tuple[str, str]],
) -> bool:
    """Return True if the first of each pair is a copy of the second, or missing."""
    if json.get(name) is False:
        return False
    equal = all(
        first not in tensors or is_copy(tensors[first], tensors[second])
        for first, second in pairs
        if second in tensors
    )
    if json.get(name) is True and not equal:
        raise SaccadeError(
            f"{path}: --config has {name} true, but {pairs[0][0]} differs from {pairs[0][1]}. "
            "Pass the JSON of this model."
        )
    return equal
