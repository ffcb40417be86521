# SPDX-License-Identifier: Apache-2.0
"""Options of a training run, and how they change a family's recipe."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from saccade.core.checks import check_one_of
from saccade.core.errors import SaccadeError
from saccade.core.json_text import JSONRefused, parse_json
from saccade.core.options import Options
from saccade.core.schema import BelowOne, Count, Natural, NonNegative, Positive, Range
from saccade.models.data.options import DataOptions, here
from saccade.models.training.task import Recipe


@dataclass(frozen=True)
class TrainOptions(Options):
    """Options of training; defaults come from the family's recipe."""

    # checkpoint to write: a .safetensors file, with a .csv log next to it; or a run folder (a name
    # without an ending), with everything that repeats the run and its curves
    out: Path
    # name of a data set, or your own data: a folder, .npz, .csv, .jsonl, .json, .parquet or .tar
    # (see docs/data.md); default: data that the family generates or that comes with a library
    data: str | None = None
    labels: Path | None = None  # names of the data's classes, one per line, in order
    data_root: Path | None = None  # folder in which a manifest's paths begin; default: its own
    skip_bad: Natural = 0  # leave out at most this many unreadable rows of each split
    background: tuple[int, ...] = (0,)  # values of masks that are background, such as 0,255
    # training recipe: at most 10 minutes (quick) or 150 minutes (shipped) on two cores
    recipe: Literal["quick", "shipped"] = "quick"
    # fields of the model's configuration, such as dim=64
    set: dict[str, Any] = field(default_factory=dict)
    steps: Count | None = None  # number of optimizer steps; default: the recipe's
    batch: Count | None = None  # samples per step; default: the recipe's
    learning_rate: Positive | None = None  # peak learning rate; default: the recipe's
    # train on this many samples of each class, drawn with --seed (few-shot); default: all
    shots: Count | None = None
    weight_decay: NonNegative | None = None  # weight decay of matrices; default: the recipe's
    # random changes of training images: affine, crop, flip, jitter, randaugment, erasing, each
    # with a number if you like (crop=0.35), or none; default: the family's
    augment: tuple[str, ...] = ()
    # mix two images and their labels: alpha, such as 0.8; default: 0
    mixup: NonNegative | None = None
    # paste a box of another image: alpha, such as 1.0; default: 0
    cutmix: NonNegative | None = None
    label_smoothing: BelowOne | None = None  # share of a label spread over all classes
    # stochastic depth: share of dropped branches in the last block
    drop_path: BelowOne | None = None
    # factor on the learning rate from each layer of the trunk to the one before, such as 0.75
    layer_decay: Annotated[float, Range(0, 1, above=True)] | None = None
    # precision of matrix products; bf16 uses autocast, also on a CPU
    precision: Literal["fp32", "bf16"] | None = None
    # side in pixels that image files are resized to; default: that of --init or --trunk, or 32
    side_px: Annotated[int, Range(4)] | None = None
    # checkpoint whose weights to start from: a file, a folder, or shipped:NAME
    init: Path | None = None
    # pretrained trunk to start from under a new head: a checkpoint, a folder of timm, transformers
    # or OpenCLIP, or the file of a ResNet with torchvision's names
    trunk: Path | None = None
    # parts of the model that keep the weights of --init or --trunk, such as trunk
    freeze: tuple[str, ...] = ()
    seed: Natural = 0  # random seed of weights, batches and dropout
    threads: Count = 1  # CPU threads; small models gain nothing from more
    device: Literal["cpu", "cuda"] = "cpu"  # device to train on; cuda uses one GPU per process
    # processes that share each batch, which stays as large; torchrun starts them itself
    processes: Count = 1
    # parts of a process's share of a batch that are computed one after the other, to save memory
    accumulate: Count = 1
    # compute the activations of repeated blocks again for gradients, to save memory
    checkpoint_activations: bool = False
    # also log to: tensorboard, wandb (offline: files only), wandb-online
    log_to: tuple[str, ...] = ()
    resume: bool = False  # continue an interrupted run from the state next to --out
    force: bool = False  # replace what exists at --out

    groups: ClassVar[Mapping[str, str]] = {
        "data": "data labels data_root skip_bad background side_px shots",
        "model": "set init trunk freeze",
        "training": "recipe steps batch learning_rate weight_decay layer_decay seed",
        "regularization": "augment mixup cutmix label_smoothing drop_path",
        "machine": "device threads processes precision accumulate checkpoint_activations",
    }
    start: ClassVar[Any] = None  # the checkpoint of --init, see `start.RunOptions`
    given_trunk: ClassVar[Any] = None  # that of --trunk
    once: ClassVar[Any] = staticmethod(here)  # the processes of a run read all images once

    @property
    def new_side_px(self) -> int:
        """Return the side of a new model's images."""
        return self.side_px or 32

    @property
    def asked(self) -> DataOptions:
        """Return the options of the user's data."""
        begun = self.start or self.given_trunk
        preprocessing = None if begun is None else begun.preprocessing
        given = (self.labels, self.data_root, self.skip_bad, self.background, preprocessing)
        return DataOptions(*given, self.shots, self.seed, once=self.once)

    def value(self, name: str, default: Any) -> Any:
        """Return a field of `--set`, or else of the checkpoint of `--init`, or of `--trunk`."""
        known = {} if self.start is None else self.start.config
        if self.given_trunk is not None:
            known = self.given_trunk.fields
        return self.set.get(name, known.get(name, default))

    @property
    def state_path(self) -> Path:
        """Path of the run's state; it exists until the checkpoint is written."""
        return self.out.with_name(f"{self.out.stem}.resume.pt")

    @property
    def is_folder(self) -> bool:
        """Whether the run is written as a folder, see `run_folder.write_run`."""
        return not self.out.suffix

    @property
    def log_path(self) -> Path:
        """Path of the log; of a run folder, until it is written."""
        if self.is_folder:
            return self.out.with_name(f"{self.out.name}.resume.csv")
        return self.out.with_suffix(".csv")

    @property
    def logs_path(self) -> Path:
        """Folder of `--log-to`; of a run folder, until it is written."""
        return self.out.with_name(f"{self.out.stem}.logs")


# Options that replace a field of the recipe, those of regularization last.
REGULARIZATION = ("augment", "mixup", "cutmix", "label_smoothing", "drop_path", "layer_decay")
RECIPE_FIELDS = ("steps", "batch", "learning_rate", "weight_decay", "precision", *REGULARIZATION)


def chosen_recipe(options: TrainOptions, *, quick: Recipe, shipped: Recipe) -> Recipe:
    """Return the recipe that the options name, with the fields that they give."""
    given = {
        name: getattr(options, name)
        for name in RECIPE_FIELDS
        if getattr(options, name) not in (None, ())
    }
    return replace(shipped if options.recipe == "shipped" else quick, **given)


def chosen_config(
    config_class: Any, options: TrainOptions, *parts: Mapping[str, Any], known: Sequence[str] = ()
) -> Any:
    """Return the family's configuration: `parts`, later ones winning, then `--set`.

    The second part is what the data decides. With `--init`, its checkpoint replaces all but the
    number of classes; with `--trunk`, the trunk's fields replace those of `parts`.
    `known` are further keys that the family's task reads from `options.set` itself.

    Raises: SaccadeError if `--set` names an unknown field, or a value is out of range.
    """
    names = [field.name for field in fields(config_class)]
    values: dict[str, Any] = {"seed": options.seed} if "seed" in names else {}
    for part in parts:
        values |= part
    if options.start is not None:
        values |= _kept(options, parts[1] if len(parts) > 1 else {})
    if options.given_trunk is not None:
        values |= _of_trunk(options, parts[1] if len(parts) > 1 else {})
    check_fields(config_class, options.set, known)
    values |= {key: value for key, value in options.set.items() if key in names}
    return config_class.from_dict(values)


def check_fields(config_class: Any, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Check that what `--set` gives are fields of the configuration, or `known`.

    Raises: SaccadeError naming the first that is neither.
    """
    names = (*(field.name for field in fields(config_class)), *known)
    for key in given:
        check_one_of("--set: a field", key, names)


# Fields that a checkpoint shares with the data it is trained on further.
_IMAGE_FIELDS = ("height_px", "width_px", "channels", "mean", "std")
_SHARED = ("input", *_IMAGE_FIELDS[:3], "max_tokens", "dim", "vocabulary", "max_length", "tokens")
_CLASSES = ("classes", "answers")


def _kept(options: TrainOptions, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the checkpoint of `--init` decides, for data of these fields."""
    config = options.start.config
    if fixed := sorted(set(_IMAGE_FIELDS) & set(options.set)):
        raise SaccadeError(
            f"--set {fixed[0]}: the checkpoint of --init determines its images. Leave it out."
        )
    # SPARO's vocabulary is the number of its words, which are checked below.
    names = [name for name in _SHARED if name in data and not _counts_words(name, data)]
    for name in names:
        wanted = list(data[name]) if isinstance(data[name], tuple) else data[name]
        if config.get(name, wanted) != wanted:
            raise SaccadeError(
                f"--init {options.init}: {name} is {config[name]!r:.80}, but the data has "
                f"{wanted!r:.80}. Pass data like the checkpoint's, or train without --init."
            )
    _check_words(options, data)
    return {key: value for key, value in config.items() if not (key in _CLASSES and key in data)}


def _of_trunk(options: TrainOptions, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that `--trunk` decides, for data with images of its size if it has one."""
    fields: dict[str, Any] = options.given_trunk.fields
    fixed = sorted(set(fields) & set(options.set) - set(options.given_trunk.free))
    if fixed:
        raise SaccadeError(
            f"--set {fixed[0]}: the trunk of --trunk determines it ({fields[fixed[0]]!r:.80}). "
            "Leave it out."
        )
    for name in _IMAGE_FIELDS[:3]:
        if name in fields and data.get(name, fields[name]) != fields[name]:
            raise SaccadeError(
                f"--trunk {options.trunk}: {name} is {fields[name]}, but the data has "
                f"{data[name]}. Pass image files, which are resized, or arrays of the trunk's "
                "size."
            )
    return fields


def _counts_words(name: str, data: Mapping[str, Any]) -> bool:
    return name == "vocabulary" and "words" in data


def _check_words(options: TrainOptions, data: Mapping[str, Any]) -> None:
    """Check that the checkpoint of `--init` knows the data's words, and has room for its texts."""
    config = options.start.config
    known = config.get("words")
    if known and (unknown := sorted(set(data.get("words", ())) - set(known))):
        raise SaccadeError(
            f"--init {options.init}: {unknown[0]!r:.80} is not among its {len(known)} words "
            f"({len(unknown)} words of the data are not). Name the classes with words that it "
            "knows, or train without --init."
        )
    most = config.get("context_length", 0)
    if data.get("context_length", 0) > most:
        raise SaccadeError(
            f"--init {options.init}: found texts of {data['context_length']} tokens, expected at "
            f"most {most}. Shorten the names of the classes, or train without --init."
        )


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` words; a value is read as JSON if it parses, else as a string.

    Raises: SaccadeError on a word without `=`, or a key given twice.
    """
    overrides: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (key and equals):
            raise SaccadeError(f"--set {word!r} is not key=value. Write it like dim=64.")
        if key in overrides:
            raise SaccadeError(f"--set gives {key} twice. Pass it once.")
        try:
            overrides[key] = parse_json(text)
        except JSONRefused as error:
            raise SaccadeError(f"--set {key}: {error}. Pass a value for that field.") from error
        except ValueError:
            overrides[key] = text
    return overrides


def overrides_words(overrides: Mapping[str, Any]) -> list[str]:
    """Return words that `parse_overrides` reads back."""
    return [f"{key}={_text(value)}" for key, value in overrides.items()]


def _text(value: Any) -> str:
    if isinstance(value, str) and parse_overrides([f"x={value}"])["x"] == value:
        return value
    return json.dumps(value, separators=(",", ":"))
