# SPDX-License-Identifier: Apache-2.0
"""Which class stands for the family that a checkpoint names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from saccade.plugins.errors import SaccadeError

if TYPE_CHECKING:
    from torch import nn

FAMILIES = {
    "nac": "saccade.models.nac:NAC",
    "sparo": "saccade.models.sparo:Sparo",
    "sot": "saccade.models.sot:SoT",
    "slot-attention": "saccade.models.slot_attention:SlotModel",
    "vqa": "saccade.models.vqa:VQA",
    "captioner": "saccade.models.captioner:Captioner",
}


def family_class(family: str) -> Any:
    """The model class of a family; it has `config_class` with `from_dict`.

    Raises: SaccadeError if there is no such family.
    """
    if family not in FAMILIES:
        raise SaccadeError(
            f"model family '{family}' is unknown. Expected one of: {', '.join(sorted(FAMILIES))}. "
            f"The file may come from a newer saccade."
        )
    module, name = FAMILIES[family].split(":")
    return getattr(import_module(module), name)


def build(family: str, config: dict[str, Any]) -> "nn.Module":
    """A model of that family with fresh weights.

    Raises: SaccadeError if the family is unknown or its configuration out of range.
    """
    model = family_class(family)
    return model(model.config_class.from_dict(config))
