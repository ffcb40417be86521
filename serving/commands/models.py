# SPDX-License-Identifier: Apache-2.0
"""Verbs on checkpoints: train, convert, list, score, select."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro import MISSING
from tyro.conf import Positional, arg

from saccade.core.errors import SaccadeError
from saccade.core.verbosity import is_quiet
from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.families import FAMILIES, entry_of
from saccade.models.hub import DownloadOptions, UploadOptions
from saccade.models.official.convert import SOURCES, ConvertOptions
from saccade.models.sparo.select import SelectOptions
from saccade.models.training.options import TrainOptions
from saccade.models.training.recipe_file import read_recipe, recipe_example
from saccade.serving.commands.command import Answer, Result

if TYPE_CHECKING:
    from saccade.models.catalogue import CatalogueRow

    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]


def train(
    family: Annotated[Positional[FamilyName], arg(help="family of the model to train")],
    options: TrainOptions,
    *,
    recipe_file: Annotated[
        Path | None, arg(help="TOML or YAML file of these options; those given here win")
    ] = None,
    print_recipe: Annotated[
        bool, arg(help="print these options as a recipe file, and do not train")
    ] = False,
) -> Result:
    """Train a model and write a checkpoint.

    Examples:
        # train a small model on scikit-learn's digits
        saccade train nac --data digits --out build/digits.safetensors
        # your own images, one folder per class, on a pretrained trunk
        saccade train sot --data photos --trunk vit-base --out photos.safetensors
    """
    if recipe_file is not None:
        options = _with_recipe(recipe_file, family, options)
    if print_recipe:
        text = recipe_example(family, options)
        return Answer({"family": family, "recipe": text}, text.rstrip())
    from saccade.models.training.train import train

    checkpoint = train(family, options)
    data = {"checkpoint": str(options.out), "sha256": checkpoint.sha256, "card": checkpoint.card}
    scores = checkpoint.card["validation"]
    by = entry_of(family).validation
    lines = [f"{options.out}: trained on {checkpoint.card['data']}, validation {by}:"]
    lines += [f"  {name:>12}  {float(score):.4f}" for name, score in scores.items()]
    return Answer(data, "\n".join(lines))


def recipe_defaults(words: Sequence[str]) -> dict[str, Any]:
    """Return the values that a recipe file among the words gives to arguments of `train`."""
    words = [word.partition("=")[0].replace("_", "-") + word[len(word.partition("=")[0]) :]
             if word.startswith("--") else word for word in words]  # fmt: skip
    given = [
        *(word.partition("=")[2] for word in words if word.startswith(f"{_RECIPE_FLAG}=")),
        *(after for word, after in pairwise(words) if word == _RECIPE_FLAG and after[:1] != "-"),
    ]
    defaults: dict[str, Any] = {}
    values: dict[str, Any] = {"out": Path()}
    if "--print-recipe" in words:
        named = next((word for word in words if word in FAMILIES), "model")
        values["out"] = Path("build") / f"{named}.safetensors"
    if given:
        family, read = read_recipe(Path(given[-1]))
        # A flag has no opposite on the command line, so `_with_recipe` adds those of the file.
        values |= {name: value for name, value in read.items() if value is not True}
        defaults |= {} if family is None else {"family": family}
    if given or "--print-recipe" in words:
        defaults["options"] = options = TrainOptions(**values)
        if options.out == Path():
            object.__setattr__(options, "out", MISSING)  # the parser's mark, which no option may be
    return defaults


_RECIPE_FLAG = "--recipe-file"


def _with_recipe(path: Path, family: str, options: TrainOptions) -> TrainOptions:
    """Return the options of the command line with the file's flags and fields of `set`."""
    named, values = read_recipe(path)
    if named not in (None, family):
        raise SaccadeError(
            f"{path}: family is {named}, but the command line has {family}. Leave one of them out."
        )
    flags: dict[str, Any] = {name: True for name, value in values.items() if value is True}
    return replace(options, set=values.get("set", {}) | options.set, **flags)


def convert(
    source: Annotated[
        Positional[str],
        arg(
            help="code base that wrote the checkpoint, which a folder of a model hub tells itself: "
            f"{', '.join(SOURCES)}"
        ),
    ],
    options: ConvertOptions,
    checkpoint: Annotated[
        Positional[Path | None], arg(help="the authors' checkpoint file, or a model hub's folder")
    ] = None,
) -> Result:
    """Convert a checkpoint from a paper's authors, or a model hub's folder, into a saccade one.

    Examples:
        # convert a folder of a model hub, which has the labels too
        saccade convert vit-base --out build/vit.safetensors
        # convert a SPARO model, with its training configuration
        saccade convert sparo-clip epoch_32.pt --config c.json --out sparo.safetensors
    """
    from saccade.models.official.convert import AUTO, convert

    if checkpoint is None and source in SOURCES:
        raise SaccadeError(
            f"found SOURCE '{source}' without a file, expected both: saccade convert {source} FILE "
            "--out NAME.safetensors"
            + f". For the folder of that name: saccade convert ./{source}"
            * Path(source).is_dir()
        )
    report = (
        convert(AUTO, Path(source), options)
        if checkpoint is None
        else convert(source, checkpoint, options)
    )
    return Answer(report.to_dict(), report.results()) if is_quiet() else report


def upload(
    folder: Annotated[
        Positional[Path], arg(help="checkpoint folder, written by `saccade convert --out FOLDER`")
    ],
    options: UploadOptions,
) -> Result:
    """Upload a checkpoint folder to a Hugging Face hub.

    Examples:
        # upload a checkpoint folder, with a token in HF_TOKEN
        saccade upload build/animals --repo user/animals
        # the same into a branch of a new private repository
        saccade upload build/animals --repo user/animals --revision trial --private
    """
    from saccade.models.hub import upload

    return upload(folder, options)


def download(
    repo: Annotated[
        Positional[str],
        arg(help="repository: USER/NAME, or USER/NAME@REVISION for a branch, tag or commit"),
    ],
    options: DownloadOptions,
) -> Result:
    """Download a model's folder from a Hugging Face hub, without pickles.

    Examples:
        # fetch a model's folder from the Hugging Face hub
        saccade download google/vit-base-patch16-224 --out vit-base
        # fetch it at a tag or a commit, over an older copy
        saccade download google/vit-base-patch16-224@main --out vit-base --force
    """
    from saccade.models.hub import download

    return download(repo, options)


def evaluate(
    path: Annotated[Positional[Path], arg(help="a .safetensors file, or an artefact folder")],
    options: EvaluateOptions,
) -> Result:
    """Score a checkpoint, or every variant of an artefact folder, on a data set.

    Examples:
        # score a checkpoint on the data set it was trained for
        saccade evaluate shipped:digits-sum --data digits-sum
        # score every variant of a folder on 200 samples
        saccade evaluate build/digits-sum --data digits-sum --limit 200
    """
    from saccade.exporter.evaluation.evaluate import evaluate

    return evaluate(path, options)


def select(
    checkpoint: Annotated[
        Positional[Path], arg(help="a .safetensors file of a model with slots in both towers")
    ],
    options: SelectOptions,
) -> Result:
    """Choose the slots of a SPARO checkpoint to keep, for `saccade export --slots`.

    Examples:
        # rank slots by their zero-shot accuracy
        saccade select shipped:sparo-shapes --out build/slots.json
        # train a mask of whole slots instead
        saccade select shipped:sparo-shapes --masks slot --out build/slots.json
    """
    from saccade.models.sparo.select import select

    selection = select(checkpoint, options)
    order = selection.selection["order"]
    shown = ", ".join(str(slot) for slot in order[:8]) + (", ..." if len(order) > 8 else "")
    data = {"out": str(options.out), **selection.selection, "scores": list(selection.scores)}
    return Answer(data, f"{options.out}: {len(order)} slots, best first: {shown}")


def models(
    family: Annotated[
        Positional[FamilyName | None], arg(help="list only the sizes of this family")
    ] = None,
) -> Result:
    """List every family and size: parameters, outputs, budgets, source.

    Examples:
        # list every family and size
        saccade models
        # list the sizes of one family
        saccade models slot-attention
    """
    from saccade.models.catalogue import list_models

    rows = list_models(family)
    return Answer([row.to_dict() for row in rows], models_table(rows))


_NOTE = (
    "Inputs: the first input of each component. Multiply-adds: for one sample at the\n"
    "largest budget. `saccade models --json` lists every tensor."
)
_COLUMNS = 80


def models_table(rows: "Sequence[CatalogueRow]") -> Any:
    """Return a table per family, with a row per size, that fits into 80 columns.

    What the sizes of a family share is printed once.
    """
    from rich.console import Group
    from rich.text import Text

    families = groupby(rows, key=lambda row: row.family)
    parts = [part for _, sizes in families for part in (_family_table(list(sizes)), Text(""))]
    return Group(*parts, Text(_NOTE))


def _family_table(rows: "Sequence[CatalogueRow]") -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    first = rows[0]
    notes = [
        *_shared("outputs", [(row.name, "; ".join(_lines(row.outputs))) for row in rows]),
        *_shared(
            "budgets", [(row.name, f"{', '.join(row.settings)} ({row.unit})") for row in rows]
        ),
    ]
    table = Table(
        title=Text(f"{first.family}: {first.source}"),
        title_justify="left",
        caption=Text("\n".join(notes)),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        width=_COLUMNS,
    )
    table.add_column("size", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("multiply-adds", justify="right")
    table.add_column("inputs", ratio=1)
    for row in rows:
        cells = (
            row.name,
            f"{row.parameters:,}",
            _multiply_adds(row.multiply_adds),
            "\n".join(_lines({role: names[:1] for role, names in row.inputs.items()})),
        )
        # As plain text: rich would read the brackets of the axes as a style.
        table.add_row(*map(Text, cells))
    return table


def _shared(what: str, values: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line per value with the sizes that have it; most sizes share one value."""
    by_value: dict[str, list[str]] = {}
    for name, value in values:
        by_value.setdefault(value, []).append(name)
    if len(by_value) == 1:
        return [f"{what}: {next(iter(by_value))}"]
    return [f"{what} of {', '.join(names)}: {value}" for value, names in by_value.items()]


def _multiply_adds(counts: Mapping[str, int]) -> str:
    """Return the counts with three digits, which are enough to compare; the JSON has them all."""
    return "\n".join(
        (f"{role}: " if role else "") + _short(count) for role, count in counts.items()
    )


def _short(count: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count)


def _lines(tensors: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a line per component."""
    return [(f"{role}: " if role else "") + ", ".join(names) for role, names in tensors.items()]
