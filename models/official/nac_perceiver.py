# SPDX-License-Identifier: Apache-2.0
"""The Perceiver IO that the NAC authors compare with, by the names of their NAC."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from saccade.models.official.claims import whole_number
from saccade.models.official.conversion import Official
from saccade.models.official.nac_forms import GRAPH, Form
from saccade.models.official.vit_keys import hint

if TYPE_CHECKING:
    from torch import Tensor

_ATTENTION = (r"fn\.to_q\.(weight)", "query_compiler.lin"), (r"fn\.to_out\.(.*)", "exit_layer.lin")
_NORMS = (r"norm\.(.*)", "receiver_layernorm"), (r"norm_context\.(.*)", "sender_layernorm")
_FFN = (
    (r"norm\.(.*)", "layernorm"),
    (r"fn\.net\.0\.(.*)", "ffn.0.lin"),
    (r"fn\.net\.2\.(.*)", "ffn.2.lin"),
)
_PLACES = (
    (r"cross_attend_blocks\.0\.", "read_in.read_in_attention.", (*_ATTENTION, *_NORMS)),
    (r"cross_attend_blocks\.1\.", "read_in.ffn.", _FFN),
    (r"layers\.(\d+)\.0\.", r"propagators.\1.latent_attention.", (*_ATTENTION, *_NORMS)),
    (r"layers\.(\d+)\.1\.", r"propagators.\1.ffn.", _FFN),
    (r"decoder_cross_attn\.", "read_out.latent_attention.", (*_ATTENTION, *_NORMS)),
    (r"decoder_ff\.", "read_out.ffn.", _FFN),
)
_WHOLE = {
    "latents": "input_latents.codes_",
    "classification_query": "output_latents.codes_",
    "to_logits.weight": "read_out.head.1.lin.weight",
    "to_logits.bias": "read_out.head.1.lin.bias",
}


def is_perceiver(tensors: "Mapping[str, Tensor]") -> bool:
    """Whether the file is of that baseline."""
    return "latents" in tensors and "decoder_cross_attn.fn.to_q.weight" in tensors


def renamed(tensors: "Mapping[str, Tensor]") -> "tuple[dict[str, Tensor], dict[str, str]]":
    """The tensors by the names of the NAC, and by each of those its key in the file.

    Keys and values lie in one tensor, the keys first. Names that are unknown stay.
    """
    found: dict[str, Tensor] = {}
    keys: dict[str, str] = {}
    for key, value in tensors.items():
        pair = re.fullmatch(r"(.*)fn\.to_kv\.weight", key)
        if pair is not None and (place := _place(pair[1])) is not None:
            names = [f"{GRAPH}{place}{each}_compiler.lin.weight" for each in ("key", "value")]
            found |= dict(zip(names, value.chunk(2), strict=True))
        else:
            names = [_name(key)]
            found[names[0]] = value
        keys |= dict.fromkeys(names, key)
    return found, keys


def _place(start: str) -> str | None:
    for pattern, ours, _ in _PLACES:
        if match := re.fullmatch(pattern, start):
            return match.expand(ours)
    return None


def _name(key: str) -> str:
    if key in _WHOLE:
        return GRAPH + _WHOLE[key]
    if key.startswith("tokenizer."):
        return f"input_{key}"
    for pattern, ours, parts in _PLACES:
        for part, name in parts:
            if match := re.fullmatch(pattern + part, key):
                return f"{GRAPH}{match.expand(ours)}{name}.{match[match.lastindex or 0]}"
    return key


def perceiver_form(official: Official) -> Form:
    """Heads of 64 and no kernel, or other heads as --config says."""
    config = hint(official.config, "model", "kwargs", default=official.config)
    wide = whole_number(hint(config, "latent_dim_head", default=64), "latent_dim_head")
    read = whole_number(hint(config, "cross_dim_head", default=64), "cross_dim_head")
    return Form(head_dim=wide, read_in_head_dim=read, read_out_head_dim=read, dense=True)
