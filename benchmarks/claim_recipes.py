# SPDX-License-Identifier: Apache-2.0
"""The recipes of benchmarks/claims with their finished runs: claims, differences, verdicts.

The number of seeds is fixed, and a claim has no verdict before all of them are finished. Runs with
the same seed see the same batches, so differences are paired by seed; intervals are t intervals.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from result_file import RESULTS, interval

RECIPES = Path(__file__).parent / "claims"
SEEDS = 5  # of every arm unless its experiment names another number, decided before the first run
NEEDS_DATA = "needs data we do not have"
NOT_RUN = "not run"
Scores = Mapping[str, float]


@dataclass(frozen=True)
class Claim:
    """A statement of a paper about a score of two arms, and how it is tested here.

    It is about the difference first minus second, or about the score itself if there is no second
    arm. With `minus`, the score is a change: that score minus another one of the same run.
    """

    text: str
    place: str  # in the paper
    experiment: str = ""
    first: str = ""
    second: str = ""
    score: str = ""
    second_score: str = ""  # of the second arm, if it is another one
    minus: str = ""
    above: float | None = None  # the claim: the difference is above this number
    below: float | None = None
    points: bool = True  # the score is a share, shown in percent
    needs: str = ""  # the data that it needs and we do not have
    not_run: str = ""  # why it was not run

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that it compares."""
        return tuple(arm for arm in (self.first, self.second) if arm)

    def value(self, runs: Sequence[Scores]) -> float:
        """Return what it is about, from the scores of its arms with one seed."""
        names = (self.score, self.second_score or self.score)
        values = [
            scores[name] - (scores[self.minus] if self.minus else 0.0)
            for scores, name in zip(runs, names, strict=False)
        ]
        return values[0] - sum(values[1:])

    def verdict(self, values: Sequence[float]) -> str:
        """Return the verdict on its values by seed: the interval decides it, nothing else."""
        low, high = interval(values)
        bound = self.above if self.below is None else self.below
        assert bound is not None, "a claim has a bound"
        above, below = low > bound, high < bound
        if above or below:
            return "shown" if above == (self.below is None) else "opposite"
        return "not shown"


@dataclass(frozen=True)
class Experiment:
    """Arms that differ in little, trained and scored alike.

    `train` and each arm have fields of `TrainOptions`. `init` names a shipped checkpoint, or
    another arm: a start, which is trained for each seed, but not scored. `read_out` changes that of
    a SPARO, see `claim_heads`. An entry of `evaluate` has fields of `EvaluateOptions`, or the name
    of a `measure` with its arguments. `trainer` names what trains it instead of `saccade train`,
    whose arguments `train` and each arm have then.
    """

    family: str
    scale: str  # what was trained, in words
    arms: dict[str, dict[str, Any]]
    evaluate: dict[str, dict[str, Any]]
    train: dict[str, Any] = field(default_factory=dict)
    seeds: int = SEEDS
    trainer: str = ""

    @property
    def scored(self) -> tuple[str, ...]:
        """The arms from which no other starts."""
        starts = {arm.get("init") for arm in self.arms.values()}
        return tuple(arm for arm in self.arms if arm not in starts)

    def training(self, arm: str) -> dict[str, Any]:
        """Return the fields of `TrainOptions` of an arm."""
        own = {name: value for name, value in self.arms[arm].items() if name != "read_out"}
        return self.train | own | {"set": self.train.get("set", {}) | own.get("set", {})}

    def settings(self, arm: str) -> str:
        """Return a hash of all that decides the scores of an arm, besides seed and sources."""
        training = self.training(arm)
        decides: list[Any] = [self.family, training, self.evaluate]
        if "read_out" in self.arms[arm]:
            decides.append(self.arms[arm]["read_out"])
        if self.trainer:
            decides.append(self.trainer)
        if training.get("init") in self.arms:
            decides.append(self.settings(training["init"]))
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Paper:
    """The recipe of a paper, and its finished runs by experiment/arm/seed."""

    name: str
    title: str
    experiments: dict[str, Experiment]
    claims: tuple[Claim, ...]
    runs: dict[str, dict[str, Any]]

    def finished(self, experiment: str, arm: str, seed: int) -> dict[str, Any] | None:
        """Return the run if it has the settings of the recipe."""
        run = self.runs.get(f"{experiment}/{arm}/{seed}")
        known = self.experiments[experiment].settings(arm)
        return run if run and run["settings"] == known else None

    def missing(self, experiment: str, arm: str = "") -> Iterator[tuple[str, int]]:
        """Yield what to run of an experiment or one of its arms: arms and seeds."""
        known = self.experiments[experiment]
        for each in [arm] if arm else known.scored:
            for seed in range(known.seeds):
                if self.finished(experiment, each, seed) is None:
                    yield each, seed

    def seeds(self, claim: Claim) -> int:
        """Return the number of seeds that a claim needs; 0 if it is not tested."""
        return self.experiments[claim.experiment].seeds if claim.experiment else 0

    def verdict(self, claim: Claim) -> str:
        """Return the verdict on a claim, once all of its seeds are finished."""
        values = self.values(claim)
        if len(values) < self.seeds(claim) or claim.not_run:
            return NOT_RUN
        return NEEDS_DATA if claim.needs else claim.verdict(values)

    def values(self, claim: Claim) -> list[float]:
        """Return what a claim is about, by seed; fewer than all if runs are missing."""
        values = []
        for seed in range(self.seeds(claim)):
            runs = [self.finished(claim.experiment, arm, seed) for arm in claim.arms]
            scores = [run["scores"] for run in runs if run]
            if len(scores) == len(runs):
                values.append(claim.value(scores))
        return values


def result_path(paper: str) -> Path:
    """Return the result file of a paper."""
    return RESULTS / f"claims_{paper}.json"


def papers() -> dict[str, Paper]:
    """Return the papers by name, with their runs.

    Raises: ValueError if a claim names what its experiment does not have, or has no bound.
    """
    return {path.stem: _paper(path) for path in sorted(RECIPES.glob("*.toml"))}


def _paper(path: Path) -> Paper:
    recipe = tomllib.loads(path.read_text())
    experiments = {name: Experiment(**given) for name, given in recipe["experiments"].items()}
    claims = tuple(Claim(**given) for given in recipe["claims"])
    for claim in claims:
        check(path, claim, experiments)
    runs = parse_runs(result_path(path.stem))
    return Paper(path.stem, recipe["title"], experiments, claims, runs)


def parse_runs(path: Path) -> dict[str, dict[str, Any]]:
    """Return the runs of a result file, by experiment/arm/seed; none if it does not exist."""
    runs: dict[str, dict[str, Any]] = json.loads(path.read_text())["runs"] if path.exists() else {}
    return runs


def check(path: Path, claim: Claim, experiments: Mapping[str, Experiment]) -> None:
    """Check that a claim can be tested, or says why it was not.

    Raises: ValueError if it names an unknown arm, or has no bound or no reason.
    """
    where = f"{path}: the claim {claim.text!r}"
    if bool(claim.experiment) == bool(claim.needs or claim.not_run):
        raise ValueError(f"{where} needs an experiment, or a reason why there is none.")
    if not claim.experiment:
        return
    if (claim.above is None) == (claim.below is None):
        raise ValueError(f"{where} needs one bound, above or below.")
    if unknown := set(claim.arms) - set(experiments[claim.experiment].scored):
        raise ValueError(f"{where} names the unknown arm {min(unknown)}.")
