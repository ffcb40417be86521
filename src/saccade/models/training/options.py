# SPDX-License-Identifier: Apache-2.0
"""Options of a training run, and how they change a family's recipe."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from saccade.errors import SaccadeError
from saccade.json_text import JSONRefused, parse_json
from saccade.models.data.asked import DataAsked, check_skip_bad
from saccade.models.training.task import Recipe
from saccade.path_fields import PathFields
from saccade.spelling import did_you_mean


@dataclass(frozen=True)
class TrainOptions(PathFields):
    """Options of training; defaults come from the family's recipe."""

    out: Path  # checkpoint to write, a .safetensors file; a .csv log is written next to it
    # name of a data set, or your own data: a folder, .npz, .csv, .jsonl, .parquet or .tar (see
    # docs/data.md); default: data that the family generates or that comes with a library
    data: str | None = None
    labels: Path | None = None  # names of the data's classes, one per line, in order
    data_root: Path | None = None  # folder in which a manifest's paths begin; default: its own
    skip_bad: int = 0  # leave out at most this many unreadable rows of each split
    # training recipe: at most 10 minutes (quick) or 150 minutes (shipped) on two cores
    recipe: Literal["quick", "shipped"] = "quick"
    # fields of the model's configuration, such as dim=64
    set: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None  # number of optimizer steps; default: the recipe's
    batch: int | None = None  # samples per step; default: the recipe's
    learning_rate: float | None = None  # peak learning rate; default: the recipe's
    # precision of matrix products; bf16 uses autocast, also on a CPU
    precision: Literal["fp32", "bf16"] | None = None
    side_px: int = 32  # side in pixels that image files are resized to
    seed: int = 0  # random seed of weights, batches and dropout
    threads: int = 1  # CPU threads; small models gain nothing from more
    device: Literal["cpu", "cuda"] = "cpu"  # device to train on; cuda uses one GPU
    resume: bool = False  # continue an interrupted run from the state next to --out
    force: bool = False  # overwrite an existing file at --out

    def __post_init__(self) -> None:
        super().__post_init__()
        check_skip_bad(self.skip_bad)

    @property
    def asked(self) -> DataAsked:
        """Return the options of the user's data."""
        return DataAsked(self.labels, self.data_root, self.skip_bad)

    @property
    def state_path(self) -> Path:
        """Path of the run's state; it exists until the checkpoint is written."""
        return self.out.with_name(f"{self.out.stem}.resume.pt")

    @property
    def log_path(self) -> Path:
        """Path of the log."""
        return self.out.with_suffix(".csv")


def chosen_recipe(options: TrainOptions, *, quick: Recipe, shipped: Recipe) -> Recipe:
    """Return the recipe that the options name, with their steps, batch, rate and precision."""
    given = {
        name: getattr(options, name)
        for name in ("steps", "batch", "learning_rate", "precision")
        if getattr(options, name) is not None
    }
    return replace(shipped if options.recipe == "shipped" else quick, **given)


def chosen_config(
    config_class: Any, options: TrainOptions, *parts: Mapping[str, Any], known: Sequence[str] = ()
) -> Any:
    """Return the family's configuration: `parts`, later ones winning, then `--set`.

    `known` are further keys that the family's task reads from `options.set` itself.

    Raises: SaccadeError if `--set` names an unknown field, or a value is out of range.
    """
    names = [field.name for field in fields(config_class)]
    values: dict[str, Any] = {"seed": options.seed} if "seed" in names else {}
    for part in parts:
        values |= part
    for key, value in options.set.items():
        if key in names:
            values[key] = value
        elif key not in known:
            raise SaccadeError(
                f"--set {key}={value}: this model has no field {key!r}."
                f"{did_you_mean(key, (*names, *known))} "
                f"Choose one of: {', '.join((*names, *known))}."
            )
    return config_class.from_dict(values)


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
