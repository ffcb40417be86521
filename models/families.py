# SPDX-License-Identifier: Apache-2.0
"""Which class stands for the family that a checkpoint names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from saccade import limits
from saccade.errors import SaccadeError

if TYPE_CHECKING:
    from torch import nn

    Model = TypeVar("Model", bound=nn.Module)

FAMILIES = {
    "nac": "saccade.models.nac.model:NAC",
    "sparo": "saccade.models.sparo.model:Sparo",
    "sot": "saccade.models.sot.model:SoT",
    "slot-attention": "saccade.models.slot_attention.model:SlotModel",
    "vqa": "saccade.models.vqa.model:VQA",
    "captioner": "saccade.models.captioner.model:Captioner",
}


def family_class(family: str) -> Any:
    """The model class of a family; it has `config_class` with `from_dict`.

    Raises: SaccadeError if there is no such family.
    """
    if not isinstance(family, str) or family not in FAMILIES:
        raise SaccadeError(
            f"model family {family!r:.100} is unknown. Expected one of: "
            f"{', '.join(sorted(FAMILIES))}. The file may come from a newer saccade."
        )
    module, name = FAMILIES[family].split(":")
    return getattr(import_module(module), name)


def build(family: str, config: dict[str, Any], *, fresh: bool = True) -> "nn.Module":
    """A model of that family with fresh weights, or any: they are loaded next, and fit `outline`.

    Raises: SaccadeError if the family is unknown, its configuration out of range, or the model
        larger than `limits` allows.
    """
    model = family_class(family)
    values = model.config_class.from_dict(config)
    made: nn.Module = new_model(model, values) if fresh else model(values, fresh=False)
    return made


def new_model(kind: "type[Model]", config: Any) -> "Model":
    """A model with fresh weights, once its size is known to be one that can be.

    Raises: SaccadeError if it is larger than `limits` or the memory of this machine allows.
    """
    numbers = _numbers(_outline(kind, config))
    try:
        return kind(config)
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        raise SaccadeError(
            f"{config.called} configuration: memory for {numbers:,} numbers cannot be had here. "
            "Make its sizes smaller."
        ) from error


def outline(family: str, config: dict[str, Any]) -> "nn.Module":
    """The model with every name, shape and type, and no memory for any number.

    Raises: SaccadeError as `build` does.
    """
    model = family_class(family)
    made: nn.Module = _outline(model, model.config_class.from_dict(config))
    return made


def _outline(kind: Any, config: Any) -> Any:
    import torch

    try:
        with torch.device("meta"):
            made = kind(config, fresh=False)
    except (RuntimeError, OverflowError, MemoryError) as error:  # of sizes beyond 2^63
        raise SaccadeError(
            f"{config.called} configuration: there is no tensor of this size "
            f"({str(error).partition(chr(10))[0]:.200}). Make its sizes smaller."
        ) from error
    if (numbers := _numbers(made)) > limits.PARAMETERS:
        raise SaccadeError(
            f"{config.called} configuration: makes a model of {numbers:,} numbers, expected at "
            f"most {limits.PARAMETERS:,}. Make its sizes smaller."
        )
    return made


def _numbers(model: "nn.Module") -> int:
    return sum(each.numel() for each in (*model.parameters(), *model.buffers()))
