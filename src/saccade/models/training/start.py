# SPDX-License-Identifier: Apache-2.0
"""Start a run from a checkpoint: its weights, a new head for other classes, frozen parts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from saccade.errors import SaccadeError, ShapeError
from saccade.files import sha256_of
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.checkpoint_folder import checkpoint_name
from saccade.models.families import outline
from saccade.models.layers.resnet import ResNet, load_resnet
from saccade.models.shipped import SHIPPED
from saccade.models.training.options import TrainOptions
from saccade.models.training.task import Task
from saccade.spelling import did_you_mean
from saccade.verbosity import note

_CLASS_FIELDS = ("classes", "answers")  # the field of a configuration that counts classes
_SHOWN = 12  # tensors in a note; the card lists all


@dataclass(frozen=True)
class StartedOptions(TrainOptions):
    """Options of a run, with the checkpoint of `--init`."""

    start: Checkpoint = field(kw_only=True)  # type: ignore[misc]


def started(family: str, options: TrainOptions) -> TrainOptions:
    """Return the options with the checkpoint of `--init`, if there is one.

    Raises: SaccadeError if it cannot be read or is of another family, or `--freeze` has no start.
    """
    if options.init is None:
        if options.freeze:
            raise SaccadeError(
                f"--freeze {','.join(options.freeze)}: found no --init, expected a checkpoint "
                "whose weights to keep. Pass --init, or leave --freeze out."
            )
        return options
    start = load(options.init)
    if start.family != family:
        raise SaccadeError(
            f"--init {options.init}: found family {start.family}, expected {family}. Pass a "
            f"checkpoint of {family}, or run saccade train {start.family}."
        )
    preprocessing = start.preprocessing
    given_px = options.side_px != TrainOptions(out=options.out).side_px
    if preprocessing and given_px and options.side_px != preprocessing.height_px:
        raise SaccadeError(
            f"--side-px is {options.side_px}, but the checkpoint of --init takes images of "
            f"{preprocessing.height_px} x {preprocessing.width_px} px. Leave --side-px out."
        )
    return StartedOptions(**vars(options), start=start)


def start_name(path: Path) -> str:
    """Return the name of `--init` without this machine's folders."""
    text = str(path)
    return text if text.startswith(SHIPPED) else checkpoint_name(path)


def load_start(task: Task, options: TrainOptions) -> None:
    """Give the task's model the weights of `--init`, freeze its parts, and record both in the card.

    Raises: ShapeError if a tensor does not fit, SaccadeError if `--freeze` cannot be used.
    """
    start: Checkpoint | None = options.start
    if start is None or options.init is None:
        return
    own = task.model.state_dict()
    redrawn, left_out = _redrawn(task, start, own)
    new = (*_new_head(task, start), *redrawn)
    given = {name: value for name, value in start.weights.items() if name not in left_out}
    _check_fit(start, given, own, new)
    task.model.load_state_dict(
        own | {name: value for name, value in given.items() if name not in new}
    )
    freeze(task.model, options.freeze, new)
    task.card = {
        **task.card,
        "init": {"name": start_name(options.init), "sha256": start.sha256},
        "new_head": list(new),
        "frozen": list(options.freeze),
        **({"left_out": list(left_out)} if left_out else {}),
    }


def _redrawn(
    task: Task, start: Checkpoint, own: dict[str, Any]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tensors of the new parts, and those that only the checkpoint has.

    The card lists all of them.
    """
    parts = task.redrawn(start.config)
    new = tuple(name for name in own if _is_in(name, parts))
    left_out = tuple(name for name in start.weights if _is_in(name, parts) and name not in own)
    if new:
        note(f"new: {len(new)} tensors ({_listed(new)})")
    if left_out:
        note(f"left out of the checkpoint: {len(left_out)} tensors ({_listed(left_out)})")
    return new, left_out


def _is_in(name: str, parts: Sequence[str]) -> bool:
    return any(is_within(name, part) for part in parts)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def load_trunk(task: Task, options: TrainOptions) -> None:
    """Give the model's ResNet the weights of `--trunk-weights`, and record them in the card.

    It is frozen unless `--tune-trunk` is given.

    Raises: SaccadeError if the model has no ResNet, or the file does not fit it.
    """
    path = options.trunk_weights
    if path is None:
        if options.tune_trunk:
            raise SaccadeError("--tune-trunk: found no --trunk-weights. Pass both, or neither.")
        return
    networks = [module for module in task.model.modules() if isinstance(module, ResNet)]
    if not networks:
        raise SaccadeError(
            f"--trunk-weights {path}: the model has no ResNet. Pass --set encoder=resnet50 (for "
            "vqa and captioner), or leave it out."
        )
    for network in networks:
        load_resnet(network, path)
        network.requires_grad_(options.tune_trunk)
    trunk = {"name": path.name, "sha256": sha256_of(path), "frozen": not options.tune_trunk}
    task.card = {**task.card, "trunk": trunk}


def _new_head(task: Task, start: Checkpoint) -> tuple[str, ...]:
    """Return the tensors whose shape depends on the number of classes, if the classes differ."""
    config: dict[str, Any] = task.model.config.to_dict()
    counted = next((name for name in _CLASS_FIELDS if name in config), None)
    if counted is None:
        return ()
    before, now = start.config.get(counted), config[counted]
    renamed = bool(start.labels and task.labels) and start.labels != tuple(task.labels)
    if before == now and not renamed:
        return ()
    larger = outline(task.family, config | {counted: now + 1}).state_dict()
    own = task.model.state_dict()
    new = tuple(name for name in own if own[name].shape != larger[name].shape)
    instead = f"instead of {before}" if before != now else "with other names"
    note(f"new head: {now} {counted} {instead} ({', '.join(new)})")
    return new


def _check_fit(
    start: Checkpoint, given: dict[str, Any], own: dict[str, Any], new: Sequence[str]
) -> None:
    for name in sorted((own.keys() | given.keys()) - set(new)):
        found = _shape(given.get(name))
        expected = _shape(own.get(name))
        if found != expected:
            raise ShapeError(
                f"{start.path}: {name}: found {found}, expected {expected}. Leave out the fields "
                "of --set that change the model's tensors, or train without --init."
            )


def _shape(tensor: Any) -> str:
    if tensor is None:
        return "no such tensor"
    kind = "number" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} {kind}"


def freeze(model: nn.Module, parts: Sequence[str], new: Sequence[str] = ()) -> None:
    """Exclude from training the parameters whose name is, or begins with, one of these parts.

    Raises: SaccadeError if there is no such part, nothing remains to train, or a part is `new`.
    """
    for part in parts:
        chosen = [name for name, _ in model.named_parameters() if is_within(name, part)]
        if not chosen:
            tops = dict.fromkeys(name.partition(".")[0] for name, _ in model.named_parameters())
            raise SaccadeError(
                f"--freeze {part}: found no parameter of that name.{did_you_mean(part, tops)} "
                f"Pass the beginning of a parameter's name. Parts of this model: {', '.join(tops)}."
            )
        if drawn := sorted(set(chosen) & set(new)):
            raise SaccadeError(
                f"--freeze {part}: {drawn[0]} is new, so it must be trained. Freeze other parts."
            )
        for name, parameter in model.named_parameters():
            if name in chosen:
                parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SaccadeError(
            f"--freeze {','.join(parts)}: nothing remains to train. Freeze fewer parts."
        )


def is_within(name: str, part: str) -> bool:
    """Return True if `part` is the name or a beginning of it up to a dot."""
    return f"{name}.".startswith(f"{part.rstrip('.')}.")
