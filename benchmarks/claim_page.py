# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/papers.md: each claim with its place, its test, its interval, its verdict."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from claim_recipes import NEEDS_DATA, NOT_RUN, Claim, Paper, interval
from result_file import table

PAGE = Path(__file__).parents[1] / "docs" / "papers.md"
VERDICTS = ("shown", "not shown", "opposite", NEEDS_DATA, NOT_RUN)
_HEAD = ("claim", "in the paper", "run here", "difference, 95 % over seeds", "seeds", "verdict")


def filled(text: str, papers: Mapping[str, Paper]) -> str:
    """Return the page with the block of each paper written from its runs."""
    for name, paper in papers.items():
        start = f"<!-- claims {name}: written by `python benchmarks/claims.py page` -->"
        end = f"<!-- end claims {name} -->"
        head, block, rest = text.partition(start)
        if not block or end not in rest:
            raise ValueError(f"the page has no block {start} ... {end}")
        text = f"{head}{start}\n\n{section(paper)}\n\n{end}{rest.partition(end)[2]}"
    return text


def section(paper: Paper) -> str:
    """Return the table of a paper, below its counts, its experiments and where they ran."""
    verdicts = Counter(map(paper.verdict, paper.claims))
    tested = len(paper.claims) - verdicts[NEEDS_DATA] - verdicts[NOT_RUN]
    said = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS if verdicts[verdict])
    rows = [_row(paper, claim) for claim in paper.claims]
    lines = [f"{len(paper.claims)} claims, {tested} of them tested here: {said}."]
    experiments = "\n".join(
        f"- **{name}**: {experiment.scale}" for name, experiment in paper.experiments.items()
    )
    return "\n\n".join([*lines, experiments, *_origin(paper), table(_HEAD, rows)])


def _row(paper: Paper, claim: Claim) -> tuple[str, ...]:
    verdict, values = paper.verdict(claim), paper.values(claim)
    if not claim.experiment:
        return claim.text, claim.place, f"- ({claim.needs or claim.not_run})", "", "", verdict
    tried = f"**{claim.experiment}**: {' minus '.join(_sides(claim))}"
    if verdict == NOT_RUN:
        done = f"{len(values)} of {paper.seeds(claim)}"
        return claim.text, claim.place, tried, "", done, verdict
    seeds = str(len(values))
    return claim.text, claim.place, tried, _difference(claim, values), seeds, f"**{verdict}**"


def _sides(claim: Claim) -> list[str]:
    names = (claim.score, claim.second_score or claim.score)
    changes = [f"{name} minus {claim.minus}" if claim.minus else name for name in names]
    if claim.second and changes[0] == changes[1]:
        return [claim.first, f"{claim.second}, {changes[0]}"]
    return [f"{arm} ({change})" for arm, change in zip(claim.arms, changes, strict=False)]


def _difference(claim: Claim, values: list[float]) -> str:
    factor, unit = (100, " points") if claim.points else (1, "")
    low, high = interval(values)
    bound = claim.above if claim.below is None else claim.below
    text = f"{_number(factor * float(np.mean(values)))}{unit} ({_number(factor * low)} to "
    text += f"{_number(factor * high)})"
    if bound:
        side = "above" if claim.below is None else "below"
        text += f"; the claim: {side} {_number(factor * bound)}"
    return text


def _number(value: float) -> str:
    digits = 1 if abs(value) >= 1 else 2 if abs(value) >= 0.1 else 3
    return f"{value:+.{digits}f}"


def _origin(paper: Paper) -> list[str]:
    """Return a sentence on the machine, the commits, the dates and the load of the runs."""
    runs = list(paper.runs.values())
    if not runs:
        return []

    def listed(key: str) -> str:
        return ", ".join(sorted({run[key][:8] if key == "commit" else run[key] for run in runs}))

    loads = [run["load_average"] for run in runs if "load_average" in run]
    load = f"load {min(loads):.1f} to {max(loads):.1f}" if loads else "load not recorded"
    results = f"[results](../benchmarks/results/claims_{paper.name}.json)"
    recipe = f"[recipe](../benchmarks/claims/{paper.name}.toml)"
    return [
        f"{len(runs)} runs on {listed('device')} (one thread, {load}). Dates: {listed('date')}. "
        f"Commits: {listed('commit')} ({results}, {recipe})."
    ]
