# SPDX-License-Identifier: Apache-2.0
"""The trunk of SPARO's image tower, given to other models and taken from them."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from saccade.errors import SaccadeError
from saccade.models.sparo.config import SparoConfig
from saccade.models.trunks import PretrainedTrunk, TrunkPort, TrunkShape

if TYPE_CHECKING:
    from torch import Tensor

# Ours by the trunk's names; class tokens and positions are renamed alone.
_NAMES = {"embed.project.": "image.patches.", "norm_input.": "image.norm_input."}
_BLOCKS = "blocks."
_IMAGE_FIELDS = ("height_px", "width_px", "channels", "mean", "std", "patch_px")


def _rules(config: SparoConfig) -> dict[str, str]:
    """Return our beginnings of names by the trunk's."""
    return _NAMES | {"norm.": f"{config.trunk_norm}.", _BLOCKS: f"image.{_BLOCKS}"}


def _read(name: str, config: Mapping[str, Any], weights: "Mapping[str, Tensor]") -> PretrainedTrunk:
    import torch

    own = SparoConfig.from_dict(dict(config))
    shape = TrunkShape(
        **{field: getattr(own, field) for field in _IMAGE_FIELDS},
        dim=own.image_width,
        registers=own.registers,
        pre_norm=own.pre_norm,
        activation=own.activation,
        layer_norm_epsilon=own.eps,
        layers=own.image_layers - own.reduce_depth,
        heads=own.image_heads,
        mlp_dim=own.image_hidden,
    )
    tensors = {}
    for theirs, mine in _rules(own).items():
        for key, value in weights.items():
            if key.startswith(mine):
                tensors[theirs + key.removeprefix(mine)] = value
    first = [weights["image.class_token"][None]]
    if own.registers:
        first.append(weights["image.registers"])
    tensors["class_tokens"] = torch.cat(first)
    tensors["position"] = weights["image.position"]
    if not own.patch_bias:
        tensors["embed.project.bias"] = torch.zeros(own.image_width)
    return PretrainedTrunk(shape, tensors)


def _fields(shape: TrunkShape) -> dict[str, Any]:
    if not shape.is_vit or shape.token_embedding != "naive":
        raise SaccadeError(
            f"--trunk: found a {shape.described()}, but the image tower of this family is a ViT "
            "with one linear layer per patch. Pass a ViT, DeiT, DINOv2 or CLIP."
        )
    return {
        **{field: getattr(shape, field) for field in _IMAGE_FIELDS},
        "patch_bias": True,
        "pre_norm": shape.pre_norm,
        "registers": shape.registers + shape.specials - 1,
        "activation": shape.activation,
        "eps": shape.layer_norm_epsilon,
        "image_width": shape.dim,
        "image_layers": shape.layers,
        "image_heads": shape.heads,
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
    ours["image.class_token"] = trunk.weights["class_tokens"][0]
    if config.registers:
        ours["image.registers"] = trunk.weights["class_tokens"][1:]
    ours["image.position"] = trunk.weights["position"]
    if not trunk.shape.qkv_bias:
        for index in range(depth):
            name = f"image.blocks.{index}.attention.qkv.bias"
            ours[name] = torch.zeros(3 * config.image_width)
    return ours


TRUNK = TrunkPort(read=_read, fields=_fields, state=_state, free=("reduce_depth",))
