# SPDX-License-Identifier: Apache-2.0
"""The trunk whose patches a NAC reads, given to other models and taken from them.

Source: Weiss et al. 2022, section 4.4: a frozen pretrained backbone preprocesses the images.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.models.nac.config import NACConfig
from saccade.models.trunks import KNOWN, PretrainedTrunk, TrunkPort, TrunkShape

if TYPE_CHECKING:
    from torch import Tensor

_PLACE = "tokenizer.trunk."
_IN_PAIR = "tokenizer.each.trunk."
_IMAGE_FIELDS = ("height_px", "width_px", "channels", "mean", "std", "patch_px")


def _read(name: str, config: Mapping[str, Any], weights: "Mapping[str, Tensor]") -> PretrainedTrunk:
    nac = NACConfig.from_dict(dict(config))
    if nac.trunk is None:
        raise SaccadeError(
            f"--trunk {name}: this NAC reads its input through the tokenizer "
            f"'{nac.tokenizer}', not a trunk. Pass {KNOWN}."
        )
    place = _place(nac)
    tensors = {
        key.removeprefix(place): value for key, value in weights.items() if key.startswith(place)
    }
    return PretrainedTrunk(nac.trunk, tensors)


def _fields(shape: TrunkShape) -> dict[str, Any]:
    if shape.token_embedding != "naive":
        raise SaccadeError(
            f"--trunk: found a trunk with {shape.token_embedding} embedding, but this family takes "
            f"those with one linear layer per patch. Pass {KNOWN}."
        )
    layers = (shape.layers,) if shape.is_vit else shape.stage_layers
    heads = (shape.heads,) if shape.is_vit else shape.stage_heads
    return {
        **{field: getattr(shape, field) for field in _IMAGE_FIELDS},
        "input": "image",
        "tokenizer": shape.trunk,
        "token_width": shape.width,
        "trunk_dim": shape.dim,
        "trunk_layers": layers,
        "trunk_heads": heads,
        "trunk_mlp_dim": shape.mlp_dim,
        "trunk_first": shape.specials + shape.registers if shape.is_vit else 1,
        "trunk_pre_norm": shape.pre_norm,
        "trunk_activation": shape.activation,
        "trunk_qkv_bias": shape.qkv_bias,
        "trunk_epsilon": shape.layer_norm_epsilon,
        "trunk_window": shape.window,
        "trunk_windows_before": shape.trained_windows,
        "trunk_bottleneck": shape.bottleneck,
        "trunk_remainder": shape.remainder,
    }


def _place(config: NACConfig) -> str:
    return _PLACE if config.input_sets == 1 else _IN_PAIR


def _state(trunk: PretrainedTrunk, config: NACConfig) -> "dict[str, Tensor]":
    place = _place(config)
    return {place + key: value for key, value in trunk.weights.items()}


TRUNK = TrunkPort(read=_read, fields=_fields, state=_state)
