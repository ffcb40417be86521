# SPDX-License-Identifier: Apache-2.0
"""The trunk of a SoT, ViT, DeiT, Swin or ResNet, given to other models and taken from them."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from saccade.core.errors import SaccadeError
from saccade.models.sot.config import SoTConfig
from saccade.models.trunks import PretrainedTrunk, TrunkPort, TrunkShape

if TYPE_CHECKING:
    from torch import Tensor

_PREFIX = "trunk."
_OF_VIT = ("layers", "heads", "mlp_dim")  # a trunk with stages has them by stage


def _read(name: str, config: Mapping[str, Any], weights: "Mapping[str, Tensor]") -> PretrainedTrunk:
    sot = SoTConfig.from_dict(dict(config))
    if sot.input != "image":
        raise SaccadeError(
            f"--trunk {name}: takes the states of a text, expected a model of images. Pass another."
        )
    tensors = {
        key.removeprefix(_PREFIX): value
        for key, value in weights.items()
        if key.startswith(_PREFIX)
    }
    return PretrainedTrunk(sot.shape, tensors)


def _fields(shape: TrunkShape) -> dict[str, Any]:
    fields = asdict(shape)
    if not shape.is_vit:
        fields = {name: value for name, value in fields.items() if name not in _OF_VIT}
    # Without a class token, the other fusions have nothing to read.
    return fields if shape.specials else fields | {"fusion": "visual"}


def _state(trunk: PretrainedTrunk, config: SoTConfig) -> "dict[str, Tensor]":
    return {_PREFIX + key: value for key, value in trunk.weights.items()}


TRUNK = TrunkPort(read=_read, fields=_fields, state=_state, free=("fusion",))
