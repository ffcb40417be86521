# SPDX-License-Identifier: Apache-2.0
"""Start a run from a checkpoint, or from the trunk of one: weights, new parts, frozen parts."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from saccade.core.checks import did_you_mean
from saccade.core.errors import SaccadeError, ShapeError
from saccade.core.verbosity import note
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.checkpoint_folder import checkpoint_name
from saccade.models.data.options import Once, here
from saccade.models.entry import imported
from saccade.models.families import entries, entry_of, outline
from saccade.models.preprocessing import Preprocessing
from saccade.models.resolution import resampled
from saccade.models.shipped import SHIPPED, located
from saccade.models.training.options import TrainOptions
from saccade.models.training.task import Task
from saccade.models.trunks import KNOWN, PretrainedTrunk, TrunkPort

_CLASS_FIELDS = ("classes", "answers")  # the field of a configuration that counts classes
_SHOWN = 12  # tensors in a note; the card lists all
# Also reads what other projects wrote; a later package, so it is imported by its name.
_TRUNK_READER = "saccade.models.official.convert:read_trunk"
_TRUNK = "trunk"  # in --freeze: all tensors of --trunk, whatever the family calls them


@dataclass(frozen=True)
class TrunkSource:
    """The trunk of `--trunk`, and how the trained family takes it."""

    origin: Checkpoint
    trunk: PretrainedTrunk
    port: TrunkPort
    fields: dict[str, Any]  # of the configuration that the trunk decides
    preprocessing: Preprocessing | None  # None: the run chooses the size of its images

    @property
    def free(self) -> tuple[str, ...]:
        """The fields that `--set` may change nevertheless."""
        return self.port.free


@dataclass(frozen=True)
class RunOptions(TrainOptions):
    """Options of a run, with the checkpoint of `--init` or the trunk of `--trunk`."""

    start: Checkpoint | None = field(default=None, kw_only=True)  # type: ignore[misc]
    given_trunk: TrunkSource | None = field(default=None, kw_only=True)  # type: ignore[misc]
    once: Any = field(default=here, kw_only=True)  # type: ignore[misc]  # a `Once`


def started(family: str, options: TrainOptions, once: Once = here) -> RunOptions:
    """Return the options with the checkpoint of `--init` or the trunk of `--trunk`, if any.

    `once` does what reads all images, see `data.options.Once`.

    Raises: SaccadeError if it cannot be read, or the family cannot start from it, or `--freeze` has
        no start.
    """
    if options.trunk is not None:
        trunk = _given_trunk(family, options, options.trunk)
        return RunOptions(**vars(options), given_trunk=trunk, once=once)
    if options.init is None:
        if options.freeze:
            raise SaccadeError(
                f"--freeze {','.join(options.freeze)}: found no --init and no --trunk, expected a "
                "checkpoint whose weights to keep. Pass one of them, or leave --freeze out."
            )
        return RunOptions(**vars(options), once=once)
    start = load(options.init)
    if start.family != family:
        raise SaccadeError(
            f"--init {options.init}: found family {start.family}, expected {family}. Pass a "
            f"checkpoint of {family}, or run saccade train {start.family}."
        )
    if _has_other_side(options, start.preprocessing):
        start = _at_side(options, start)
    return RunOptions(**vars(options), start=start, once=once)


def _has_other_side(options: TrainOptions, preprocessing: Preprocessing | None) -> bool:
    given_px = options.side_px
    return bool(preprocessing and given_px and given_px != preprocessing.height_px)


def _at_side(options: TrainOptions, start: Checkpoint) -> Checkpoint:
    """Return the checkpoint of `--init` for images of `--side-px`, its positions interpolated.

    Raises: SaccadeError if it has layers for one size of images only, or patches do not fill them.
    """
    before = start.preprocessing
    assert before is not None
    images = replace(before.at_height(options.new_side_px), trained_px=())
    sizes = {"height_px": images.height_px, "width_px": images.width_px}
    config = start.config | sizes
    own, other = (outline(start.family, one) for one in (start.config, config))
    grid, wanted = (getattr(one.config, "token_grid", None) for one in (own, other))
    if grid is None or wanted is None or grid.windows != wanted.windows:
        _refuse_side(options, "the checkpoint of --init", before)
    shapes = {name: value.shape for name, value in other.state_dict().items()}
    changed = [name for name, value in start.weights.items() if value.shape != shapes[name]]
    note(f"images of {sizes['height_px']} x {sizes['width_px']} px: {', '.join(changed)} resampled")
    weights = {name: resampled(start.weights[name], grid, wanted) for name in changed}
    return replace(start, config=config, preprocessing=images, weights=start.weights | weights)


def _refuse_side(options: TrainOptions, what: str, preprocessing: Preprocessing) -> NoReturn:
    raise SaccadeError(
        f"--side-px is {options.side_px}, but {what} takes images of "
        f"{preprocessing.height_px} x {preprocessing.width_px} px. Leave --side-px out."
    )


def _given_trunk(family: str, options: TrainOptions, path: Path) -> TrunkSource:
    if options.init is not None:
        raise SaccadeError(
            f"--init {options.init} and --trunk {path} are both given, but a run starts from one "
            "of them. Pass --init for a checkpoint of this family, --trunk for a new head."
        )
    port = _port_of(family)
    if port is None:
        known = ", ".join(name for name, entry in entries() if entry.trunk)
        raise SaccadeError(
            f"--trunk {path}: {family} has no place for a pretrained trunk of images. "
            f"Leave it out, or train one of {known}."
        )
    read: Callable[[Path], Checkpoint] = imported(_TRUNK_READER)
    origin = read(located(path))
    own = _port_of(origin.family)
    if own is None or origin.preprocessing is None:
        raise SaccadeError(
            f"--trunk {path}: a checkpoint of {origin.family} has no trunk of images. Pass that of "
            f"{KNOWN}."
        )
    trunk = own.read(str(path), origin.config, origin.weights)
    images = origin.preprocessing if port.sizes_images else None
    given = TrunkSource(origin, trunk, port, port.fields(trunk.shape), images)
    if given.preprocessing and _has_other_side(options, given.preprocessing):
        _refuse_side(options, "the trunk of --trunk", given.preprocessing)
    return given


def _port_of(family: str) -> TrunkPort | None:
    name = entry_of(family).trunk
    port: TrunkPort | None = imported(name) if name else None
    return port


def start_name(path: Path) -> str:
    """Return the name of `--init` or `--trunk` without this machine's folders."""
    text = str(path)
    if text.startswith(SHIPPED):
        return text
    ours = path.suffix == ".safetensors" and not path.is_dir()
    return checkpoint_name(path) if ours else path.resolve().name


def load_start(task: Task, options: TrainOptions) -> None:
    """Give the task's model the weights of `--init` or `--trunk`, and freeze its parts.

    The card records both.
    Raises: ShapeError if a tensor does not fit, SaccadeError if `--freeze` cannot be used.
    """
    own = task.model.state_dict()
    if options.given_trunk is not None:
        given, new, card = _of_trunk(task, options, own)
    elif options.start is not None:
        given, new, card = _of_checkpoint(task, options, own)
    else:
        return
    task.model.load_state_dict(own | given)
    parts = list(options.freeze)
    if options.trunk is not None and _TRUNK in parts:
        parts = [part for part in parts if part != _TRUNK]
        parts += [name for name, _ in task.model.named_parameters() if name in given]
    freeze(task.model, parts, new)
    task.card = {**task.card, **card, "frozen": list(options.freeze)}


_Loaded = tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]  # tensors, new names, card


def _of_checkpoint(task: Task, options: TrainOptions, own: dict[str, Any]) -> _Loaded:
    start: Checkpoint = options.start
    assert options.init is not None
    parts = task.redrawn(start.config)
    redrawn = tuple(name for name in own if _is_in(name, parts))
    left_out = tuple(name for name in start.weights if _is_in(name, parts) and name not in own)
    for what, names in (("new", redrawn), ("left out of the checkpoint", left_out)):
        if names:
            listed = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            note(f"{what}: {len(names)} tensors ({listed})")
    new = (*_new_head(task, start), *redrawn)
    given = {name: value for name, value in start.weights.items() if name not in (*new, *left_out)}
    _check_fit(
        f"{start.path}", given, own, (own.keys() | given.keys()) - {*new},
        "Leave out the fields of --set that change the model's tensors, or train without --init.",
    )  # fmt: skip
    return (
        given,
        new,
        {
            "init": {"name": start_name(options.init), "sha256": start.sha256},
            "new_head": list(new),
            **({"left_out": list(left_out)} if left_out else {}),
        },
    )


def _is_in(name: str, parts: Sequence[str]) -> bool:
    return any(is_within(name, part) for part in parts)


def _of_trunk(task: Task, options: TrainOptions, own: dict[str, Any]) -> _Loaded:
    given: TrunkSource = options.given_trunk
    assert options.trunk is not None
    config, card = task.model.config, given.origin.card
    state = given.port.state(given.trunk, config)
    _check_fit(
        f"--trunk {options.trunk}", state, own, state,
        "The weights and the JSON are from different models. Copy both from one source.",
    )  # fmt: skip
    new = tuple(name for name, _ in task.model.named_parameters() if name not in state)
    shape = replace(given.trunk.shape, height_px=config.height_px, width_px=config.width_px)
    described, name = shape.described(), start_name(options.trunk)
    tops = _places(new, state)
    note(f"trunk: {described}, {len(state)} tensors from {name}; new: {', '.join(tops)}")
    facts = {
        "name": name,
        "sha256": given.origin.sha256,
        "shape": described,
        "tensors": len(state),
        **{key: card[key] for key in ("source", "file", "notes") if card.get(key)},
    }
    return state, new, {"trunk": facts, "new_parts": list(tops)}


def _check_fit(
    where: str, given: dict[str, Any], own: dict[str, Any], names: Iterable[str], advice: str
) -> None:
    for name in sorted(names):
        found, expected = _shape(given.get(name)), _shape(own.get(name))
        if found != expected:
            raise ShapeError(f"{where}: {name}: found {found}, expected {expected}. {advice}")


def _places(new: Sequence[str], kept: Collection[str]) -> tuple[str, ...]:
    """Return the modules of new tensors, as far down as they have none that are kept."""
    shared = {name.partition(".")[0] for name in kept}
    return tuple(
        dict.fromkeys(
            ".".join(name.split(".")[: 1 + (name.partition(".")[0] in shared)]) for name in new
        )
    )


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


def _shape(tensor: Any) -> str:
    if tensor is None:
        return "no such tensor"
    # Floats of any width fit: they are converted.
    kind = "floats" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {list(tensor.shape)}"


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
