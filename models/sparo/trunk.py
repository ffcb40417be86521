# SPDX-License-Identifier: Apache-2.0
"""The trunk of SPARO's image tower, given to other models and taken from them."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.models.sparo.config import SparoConfig
from saccade.models.trunks import KNOWN, PretrainedTrunk, TrunkPort, TrunkShape

if TYPE_CHECKING:
    from torch import Tensor

# Ours by the trunk's names; class tokens and positions are renamed alone.
_NAMES = {"embed.project.": "image.patches.", "norm_input.": "image.norm_input."}
_BLOCKS = "blocks."
_STAGED = "image.trunk."  # before all names of a Swin or ResNet but those of its norm
_IMAGE_FIELDS = ("height_px", "width_px", "channels", "mean", "std", "patch_px", "remainder")
_STAGE_FIELDS = ("stage_layers", "stage_heads", "window", "trained_windows", "bottleneck")


def _rules(config: SparoConfig) -> dict[str, str]:
    """Return the beginnings of our names by those of the trunk's, the first that fits wins.

    A trunk ends with the norm of all tokens, with which a pooling begins; a ResNet has none.
    """
    norm = {"norm.": f"{config.trunk_norm}."}
    if config.trunk == "vit":
        return _NAMES | norm | {_BLOCKS: f"image.{_BLOCKS}"}
    return ({} if config.shape.is_resnet else norm) | {"": _STAGED}


def _read(name: str, config: Mapping[str, Any], weights: "Mapping[str, Tensor]") -> PretrainedTrunk:
    import torch

    sparo = SparoConfig.from_dict(dict(config))
    tensors = {
        theirs + key.removeprefix(mine): value
        for theirs, mine in _rules(sparo).items()
        for key, value in weights.items()
        if key.startswith(mine)
    }
    if sparo.trunk == "vit":
        if sparo.first_tokens:
            first = [weights["image.class_token"][None]]
            if sparo.registers:
                first.append(weights["image.registers"])
            tensors["class_tokens"] = torch.cat(first)
        tensors["position"] = weights["image.position"]
        if not sparo.patch_bias:
            tensors["embed.project.bias"] = torch.zeros(sparo.image_width)
    return PretrainedTrunk(sparo.shape, tensors)


def _fields(shape: TrunkShape) -> dict[str, Any]:
    if shape.token_embedding != "naive":
        raise SaccadeError(
            f"--trunk: found a {shape.described()}, but the image tower of this family has one "
            f"linear layer per patch. Pass {KNOWN}."
        )
    first = shape.specials + shape.registers
    return {
        **{field: getattr(shape, field) for field in (*_IMAGE_FIELDS, *_STAGE_FIELDS)},
        "trunk": shape.trunk,
        "patch_bias": True,
        "patches_only": shape.is_vit and not first,
        "pre_norm": shape.pre_norm,
        "registers": max(0, first - 1),
        "activation": shape.activation,
        "eps": shape.layer_norm_epsilon,
        "image_width": shape.width,
        "image_layers": shape.layers,
        "image_heads": shape.last_heads,
        "image_hidden": shape.mlp_dim,
        "reduce_depth": 0,
    }


def _state(trunk: PretrainedTrunk, config: SparoConfig) -> "dict[str, Tensor]":
    import torch

    ours: dict[str, Tensor] = {}
    rules = _rules(config)
    depth = config.image_layers - config.reduce_depth
    for key, value in trunk.weights.items():
        block = re.match(r"blocks\.(\d+)\.", key)
        if block and int(block[1]) >= depth:
            continue  # with reduce_depth, the read-out replaces the last blocks
        for theirs, mine in rules.items():
            if key.startswith(theirs):
                ours[mine + key.removeprefix(theirs)] = value
                break
    if config.trunk == "vit":
        if config.first_tokens:
            ours["image.class_token"] = trunk.weights["class_tokens"][0]
        if config.registers:
            ours["image.registers"] = trunk.weights["class_tokens"][1:]
        ours["image.position"] = trunk.weights["position"]
    if not trunk.shape.qkv_bias:
        for name in [name for name in ours if name.endswith("attention.qkv.weight")]:
            ours[name.removesuffix("weight") + "bias"] = torch.zeros(len(ours[name]))
    return ours


TRUNK = TrunkPort(read=_read, fields=_fields, state=_state, free=("reduce_depth",))
