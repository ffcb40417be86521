# SPDX-License-Identifier: Apache-2.0
"""The trunk of SPARO's image tower, given to other models and taken from them."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from saccade.models.config_values import shared_fields
from saccade.models.sparo.config import SparoConfig
from saccade.models.trunks import PretrainedTrunk, TrunkFields, TrunkPort, TrunkShape, check_patches

if TYPE_CHECKING:
    from torch import Tensor

# Ours by the trunk's names; class tokens and positions are renamed alone.
_NAMES = {"embed.project.": "image.patches.", "norm_input.": "image.norm_input."}
_BLOCKS = "blocks."
_STAGED = "image.trunk."  # before all names of a Swin or ResNet but those of its norm


def _rules(config: SparoConfig) -> dict[str, str]:
    """Return the beginnings of our names by those of the trunk's, the first that fits wins.

    A trunk ends with the norm of all tokens, with which a pooling begins; a ResNet has none.
    """
    norm = {"norm.": f"{config.trunk_norm}."}
    if config.trunk == "vit":
        return _NAMES | norm | {_BLOCKS: f"image.{_BLOCKS}"}
    return ({} if config.shape.is_resnet else norm) | {"": _STAGED}


class SparoTrunk(TrunkPort):
    """The trunk of the image tower; class tokens and positions are renamed alone."""

    config_class = SparoConfig
    free = ("reduce_depth",)

    def shape(self, name: str, config: SparoConfig) -> TrunkShape:
        """Return the shape of the image tower."""
        return config.shape

    def read(
        self, name: str, config: Mapping[str, Any], weights: "Mapping[str, Tensor]"
    ) -> PretrainedTrunk:
        """Return the trunk of a model of this family."""
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

    def fields(self, shape: TrunkShape) -> dict[str, Any]:
        """Return the fields of images and of the image tower."""
        check_patches(shape)
        first = shape.specials + shape.registers
        return {
            **shared_fields(TrunkFields, shape),
            "patch_bias": True,
            "patches_only": shape.is_vit and not first,
            "registers": max(0, first - 1),
            "eps": shape.layer_norm_epsilon,
            "image_width": shape.width,
            "image_layers": shape.layers,
            "image_heads": shape.last_heads,
            "image_hidden": shape.mlp_dim,
            "reduce_depth": 0,
        }

    def state(self, trunk: PretrainedTrunk, config: SparoConfig) -> "dict[str, Tensor]":
        """Return tensors by their names in this family, for a configuration with `fields`."""
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


TRUNK = SparoTrunk()
