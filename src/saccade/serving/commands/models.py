# SPDX-License-Identifier: Apache-2.0
"""Verbs on checkpoints: train, convert, list, score, select."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from saccade.exporter.evaluation.options import EvaluateOptions
from saccade.models.families import FAMILIES, entry_of
from saccade.models.official.convert import SOURCES, ConvertOptions
from saccade.models.sparo.select import SelectOptions
from saccade.models.training.options import TrainOptions
from saccade.serving.commands.command import Answer, Result

if TYPE_CHECKING:
    from saccade.models.catalogue import Row

    FamilyName = str
    SourceName = str
else:
    FamilyName, SourceName = Literal[tuple(FAMILIES)], Literal[tuple(SOURCES)]


def train(
    family: Annotated[Positional[FamilyName], arg(help="which model to train.")],
    options: TrainOptions,
) -> Result:
    """Train a model and write its checkpoint."""
    from saccade.models.training.train import train

    checkpoint = train(family, options)
    data = {"checkpoint": str(options.out), "sha256": checkpoint.sha256, "card": checkpoint.card}
    scores = checkpoint.card["validation"]
    by = entry_of(family).validation
    lines = [f"{options.out}: trained on {checkpoint.card['data']}, validation {by}:"]
    lines += [f"  {name:>12}  {float(score):.4f}" for name, score in scores.items()]
    return Answer(data, "\n".join(lines))


def convert(
    source: Annotated[Positional[SourceName], arg(help="whose code wrote it.")],
    checkpoint: Annotated[Positional[Path], arg(help="the authors' file.")],
    options: ConvertOptions,
) -> Result:
    """Read a checkpoint of a paper's authors and write it as one of saccade's."""
    from saccade.models.official.convert import convert

    return convert(source, checkpoint, options)


def evaluate(
    path: Annotated[
        Positional[Path], arg(help="a .safetensors file, or what `saccade export` wrote.")
    ],
    options: EvaluateOptions,
) -> Result:
    """Score a checkpoint, or every variant of an exported folder, on data."""
    from saccade.exporter.evaluation.evaluate import evaluate

    return evaluate(path, options)


def select(
    checkpoint: Annotated[
        Positional[Path], arg(help="a .safetensors file of a model with slots in both towers.")
    ],
    options: SelectOptions,
) -> Result:
    """Choose which slots of a SPARO checkpoint to keep, for `saccade export --slots`."""
    from saccade.models.sparo.select import select

    selection = select(checkpoint, options)
    order = selection.selection["order"]
    shown = ", ".join(str(slot) for slot in order[:8]) + (", ..." if len(order) > 8 else "")
    data = {"out": str(options.out), **selection.selection, "scores": list(selection.scores)}
    return Answer(data, f"{options.out}: {len(order)} slots, best first: {shown}")


def models(
    family: Annotated[
        Positional[FamilyName | None], arg(help="only the sizes of this one.")
    ] = None,
) -> Result:
    """Every family and size: parameters, outputs, budgets, source."""
    from saccade.models.catalogue import catalogue

    rows = catalogue(family)
    return Answer([row.to_dict() for row in rows], models_table(rows))


_NOTE = "Multiply-adds: of one sample by component, counted from the graph of the first budget."


def models_table(rows: "Sequence[Row]") -> Any:
    """A row a size: parameters, cost, what comes in and out by component, budgets; sources once."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, padding=(0, 1), caption=_NOTE, caption_justify="left")
    for heading in ("family", "size"):
        table.add_column(heading, no_wrap=True)
    for heading in ("parameters", "multiply-adds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("inputs", "outputs", "budgets", "source"):
        table.add_column(heading)
    for index, row in enumerate(rows):
        first = index == 0 or rows[index - 1].family != row.family
        cells = (
            row.family,
            row.name,
            f"{row.parameters:,}",
            _multiply_adds(row.multiply_adds),
            _by_component(row.inputs),
            _by_component(row.outputs),
            f"{', '.join(row.settings)} ({row.unit})",
            row.source if first else "",
        )
        # As plain text: the brackets of the axes would be read as a style.
        table.add_row(*map(Text, cells))
    return table


def _multiply_adds(counts: Mapping[str, int]) -> str:
    """Three digits are enough to compare; the JSON has them all."""
    return "\n".join(
        (f"{role}: " if role else "") + _short(count) for role, count in counts.items()
    )


def _short(count: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count)


def _by_component(tensors: Mapping[str, Sequence[str]]) -> str:
    return "\n".join(
        (f"{role}: " if role else "") + ", ".join(names) for role, names in tensors.items()
    )
