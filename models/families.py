# SPDX-License-Identifier: Apache-2.0
"""The registry of families, one line per family; everything else is in the family's folder."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from saccade.core import limits
from saccade.core.errors import SaccadeError
from saccade.core.mapped_pages import return_tensor
from saccade.models.entry import FamilyEntry, imported

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    Model = TypeVar("Model", bound=nn.Module)

# The name in checkpoints and commands, and the package with the family's ENTRY.
FAMILIES = {
    "nac": "saccade.models.nac",
    "sparo": "saccade.models.sparo",
    "sot": "saccade.models.sot",
    "slot-attention": "saccade.models.slot_attention",
    "vqa": "saccade.models.vqa",
    "captioner": "saccade.models.captioner",
}

# Smaller weights are copied, since products of small matrices depend on their place in memory.
SHARED_BYTES = 2**20


def entry_of(family: str) -> FamilyEntry:
    """Return the entry of a family.

    Raises: SaccadeError if there is no such family, or its package has no entry.
    """
    if not isinstance(family, str) or family not in FAMILIES:
        raise SaccadeError(
            f"model family {family!r:.100} is unknown. Choose one of: "
            f"{', '.join(sorted(FAMILIES))}. The file may come from a newer saccade."
        )
    entry = getattr(import_module(FAMILIES[family]), "ENTRY", None)
    if not isinstance(entry, FamilyEntry):
        raise SaccadeError(
            f"{FAMILIES[family]}: has no ENTRY, expected the FamilyEntry of family '{family}'. "
            "Declare it in the __init__.py of that package."
        )
    return entry


def entries() -> Iterator[tuple[str, FamilyEntry]]:
    """Yield every family with its entry, in the order of the registry."""
    for family in FAMILIES:
        yield family, entry_of(family)


def family_class(family: str) -> Any:
    """Return the model class of a family; its `config_class` has `from_dict`.

    Raises: SaccadeError if there is no such family.
    """
    return imported(entry_of(family).model)


def config_class(family: str) -> Any:
    """Return the configuration class of a family, taken from its presets: it needs no torch.

    Raises: SaccadeError if there is no such family.
    """
    return type(next(iter(imported(entry_of(family).presets).values())))


def folded(model: "nn.Module") -> "nn.Module":
    """Fold a copy of the model in evaluation mode: the same function, fewer products.

    Raises: SaccadeError if the class belongs to no family.
    """
    return fold_in_place(deepcopy(model))


def fold_in_place(model: "nn.Module") -> "nn.Module":
    """Fold a model that nothing else uses: its weights become those of the result.

    Raises: SaccadeError if the class belongs to no family.
    """
    classes = {f"{base.__module__}:{base.__qualname__}" for base in type(model).__mro__}
    for _, entry in entries():
        if entry.model in classes:
            import torch

            with torch.no_grad():
                made: nn.Module = imported(entry.folded)(model.eval())
            return made.requires_grad_(False).eval()
    raise SaccadeError(
        f"{type(model).__name__}: no family has this model class, expected one of "
        f"{', '.join(FAMILIES)}. Name the class in the ENTRY of its family."
    )


def build(family: str, config: dict[str, Any], *, fresh: bool = True) -> "nn.Module":
    """Build a model of that family, with fresh weights or (if they are loaded next) any.

    Raises: SaccadeError if the family is unknown, its configuration out of range, or the model
        larger than `limits` allows.
    """
    model = family_class(family)
    values = model.config_class.from_dict(config)
    if fresh:
        return new_model(model, values)
    from saccade.models.shapes_only import Undrawn

    with Undrawn():
        return model(values, fresh=False)


def filled(
    family: str,
    config: dict[str, Any],
    weights: "Mapping[str, Tensor]",
    dtype: "torch.dtype | None" = None,
) -> "nn.Module":
    """Build a model in evaluation mode with these weights, those of floats in `dtype` (float32).

    Weights of that type with at least SHARED_BYTES are not copied: the model shares their memory.
    Of large weights that are converted, the memory of their file is given back.
    Raises: RuntimeError if keys or shapes differ, SaccadeError as `build` does.
    """
    import torch

    dtype = dtype or torch.float32
    model = build(family, config, fresh=False)
    types = {
        name: dtype if value.is_floating_point() else value.dtype
        for name, value in model.state_dict().items()
    }

    def converted(name: str, value: "Tensor") -> "Tensor":
        made = value.to(types.get(name, value.dtype), copy=value.nbytes < SHARED_BYTES)
        if made.data_ptr() != value.data_ptr():
            return_tensor(value)
        return made

    state = {name: converted(name, value) for name, value in weights.items()}
    model.load_state_dict(state, assign=True)
    return model.to(dtype).eval()


def new_model(kind: "type[Model]", config: Any) -> "Model":
    """Build a model with fresh weights, after checking its size.

    Raises: SaccadeError if it is larger than `limits` or this machine's memory allows.
    """
    numbers = _numbers(_outline(kind, config))
    try:
        return kind(config)
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        raise SaccadeError(
            f"{config.called} configuration: {numbers:,} numbers need more memory than this "
            "machine has. Make its sizes smaller."
        ) from error


def outline(family: str, config: dict[str, Any]) -> "nn.Module":
    """Build the model with every name, shape and type, without memory for any number.

    Raises: SaccadeError as `build` does.
    """
    model = family_class(family)
    made: nn.Module = _outline(model, model.config_class.from_dict(config))
    return made


def _outline(kind: Any, config: Any) -> Any:
    from saccade.models.shapes_only import ShapesOnly

    try:
        with ShapesOnly():
            made = kind(config, fresh=False)
    except (RuntimeError, OverflowError, MemoryError) as error:  # sizes beyond 2^63
        raise SaccadeError(
            f"{config.called} configuration: no tensor can have this size "
            f"({str(error).partition(chr(10))[0]:.200}). Make its sizes smaller."
        ) from error
    if (numbers := _numbers(made)) > limits.PARAMETERS:
        raise SaccadeError(
            f"{config.called} configuration: the model has {numbers:,} numbers, expected at "
            f"most {limits.PARAMETERS:,}. Make its sizes smaller."
        )
    return made


def _numbers(model: "nn.Module") -> int:
    return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
