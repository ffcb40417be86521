# SPDX-License-Identifier: Apache-2.0
"""The card of a shipped checkpoint: its origin and its scores."""

from dataclasses import dataclass, field
from typing import Any

import torch
from claim_recipes import parse_runs, result_path

from saccade.exporter.evaluation.tasks import EvaluateOptions
from saccade.models.checkpoint import Checkpoint
from saccade.models.nac.kernel import evaluation_bias, signature_distance
from saccade.models.nac.model import NAC
from saccade.models.scores.results import EvaluationResult, Score


@dataclass(frozen=True)
class Shipped:
    """Recipe of a shipped checkpoint, and the parts of its card that are not measured."""

    family: str
    what: str  # a sentence
    training: dict[str, Any] = field(default_factory=dict)  # fields of TrainOptions
    evaluations: tuple[EvaluateOptions, ...] = (EvaluateOptions(),)
    seeds: tuple[str, ...] = ()  # paper, experiment, arm and score of claims.py with this recipe
    chosen: str = ""  # why this seed was chosen
    notes: str = ""  # below the figures
    first: dict[str, Any] | None = None  # the same for the checkpoint of --init


def card(model: Shipped, built: Checkpoint, results: list[EvaluationResult]) -> str:
    """Return the card of a checkpoint: all that its reader has to know."""
    parameters = sum(parameter.numel() for parameter in built.build().parameters())
    lines = [
        f"# {built.path.name}",
        "",
        f"{model.what} It is small ({parameters:,} parameters, "
        f"{built.path.stat().st_size / 2**20:.2f} MiB with its calibration samples), and meant "
        "only for trying out every command.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in origin(built).items()),
        "",
        "## Test scores",
        "",
        "| variant | task | score | value (95 % interval) | samples |",
        "|---|---|---|---|---|",
        *(
            f"| {result.variant} | {result.task} | {score.name} | {shown(score)} | {score.n:,} |"
            for result in results
            for score in result.scores
        ),
        "",
        *remarks(model, results),
        f"To train and score it again: `python benchmarks/shipped.py train {built.path.stem}`, "
        "then `ship`.",
        "",
        *((model.notes, "") if model.notes else ()),
    ]
    return "\n".join(lines)


def remarks(model: Shipped, results: list[EvaluationResult]) -> list[str]:
    """Return remarks on how answers were obtained, and the scores of the recipe's other seeds."""
    lines = [
        f"Captions: {result.protocol}, as in validation." for result in results if result.protocol
    ]
    if model.seeds:
        paper, experiment, arm, score = model.seeds
        runs = parse_runs(result_path(paper))
        values = [
            run["scores"][score]
            for key, run in runs.items()
            if key.startswith(f"{experiment}/{arm}/")
        ]
        seeds = ", ".join(f"{value:.3f}" for value in values)
        lines.append(
            f"One seed says little about a recipe. The {score.partition(': ')[2]} of "
            f"{len(values)} seeds is {seeds}, {sum(values) / len(values):.3f} on average "
            f"(`python benchmarks/claims.py run {paper}/{experiment}`). {model.chosen}"
        )
    return [line for text in lines for line in (text, "")]


def origin(built: Checkpoint) -> dict[str, str]:
    """Return the origin of the file."""
    said = built.card
    digests = (f"{part} `{digest}`" for part, digest in said["data_sha256"].items())
    return {
        "data": said["data"],
        "data SHA-256": ", ".join(digests),
        "seed": said["seed"],
        "command": f"`{said['command']}`",
        "training": f"{said['steps']:,} steps of {said['batch']} at {said['learning_rate']:g}, "
        f"best step {said['best_step']:,} by validation; about {said['about_minutes']} minutes, "
        f"{said['device']}",
        "validation": ", ".join(f"{key} {value:.4g}" for key, value in said["validation"].items()),
        "calibration": ", ".join(
            f"{len(array):,} {key}" for key, array in built.calibration.items()
        ),
        **circuit(built),
        "file SHA-256": f"`{built.sha256}`",
        "versions": ", ".join(f"{key} {value}" for key, value in said["versions"].items()),
    }


def circuit(built: Checkpoint) -> dict[str, str]:
    """Describe the learned links of a NAC; empty for other families."""
    if built.family != "nac":
        return {}
    mean, least, most, likely = links_of(built.build())
    return {
        "links": f"mean degree {mean:.1f} of {built.config['modules'] - 1}, as learned "
        f"({least:.1f} to {most:.1f}); {100 * likely:.1f} % of the pairs above 0.5"
    }


@torch.no_grad()
def links_of(model: NAC) -> tuple[float, float, float, float]:
    """Measure the learned links of an unconditional circuit, by its weights and not its prior.

    Units: mean, least and largest degree are sums of link probabilities to the other modules; the
        last is the share of all pairs whose link is likely.
    """
    signatures = model.generator().signatures.double()
    distance = signature_distance(signatures, signatures)
    links = evaluation_bias(distance, model.config.epsilon).exp().fill_diagonal_(0)
    degree = links.sum(1)
    likely = int((links > 0.5).sum()) / (len(degree) * (len(degree) - 1))
    return float(degree.mean()), float(degree.min()), float(degree.max()), likely


def shown(score: Score) -> str:
    """Format a score with its interval; shares in percent."""
    factor, unit = (100, " %") if score.unit == "share" else (1, "")
    text = f"{factor * score.value:.4g}{unit}"
    if score.interval is None:
        return text
    low, high = (factor * bound for bound in score.interval)
    return f"{text} ({low:.4g} to {high:.4g})"
