# SPDX-License-Identifier: Apache-2.0
"""Routes of a repository: variants, components and their inputs, and policies.

The router reads them with this file, and `saccade` writes and checks them with its classes.
Standard library only.
"""

import json
from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

SCHEMA = "saccade.routes"
VERSION = 3
# Environment variable with the folder of a service, which outlives the router's process.
RUN_FOLDER = "SACCADE_RUN_FOLDER"
# The policy of a request that allows no risk, or less than any policy is certified for. No
# calibration can write a policy of this name, because their names contain no space.
FULL = "full model"
# For this many instances, one more group is in flight: some are on their way to or from a model.
SPARE_PART = 8


class TensorRoute(NamedTuple):
    """One input or output: its name, the names or sizes of its axes, and its type."""

    name: str
    axes: str
    dtype: str


class ComponentRoute(NamedTuple):
    """One component of the model."""

    inputs: tuple[TensorRoute, ...]
    outputs: tuple[str, ...]
    optional: tuple[str, ...]  # inputs that the router fills in if a request lacks them
    encoded: tuple[str, ...]  # inputs that arrive as image files

    @property
    def required(self) -> tuple[str, ...]:
        """Inputs that a request must have."""
        return tuple(spec.name for spec in self.inputs if spec.name not in self.optional)

    def fits(self, given: Set[str]) -> bool:
        """Return whether a request with these inputs is for this component."""
        names = {spec.name for spec in self.inputs}
        return set(self.required) <= given <= names


class Route(NamedTuple):
    """One variant with the figures for the choice; they are None if it was not measured."""

    name: str
    sha256: str
    budget: float
    setting: str  # name of the budget: b0500, fast, t2
    precision: str
    score_name: str | None
    score_unit: str | None
    score: float | None
    lower_bound: float | None
    inferences_per_second: float | None
    p95_ms: float | None
    multiply_adds: int
    run_batch: int
    parts: dict[str, str]  # role -> name of the model in the server
    facts: dict[str, Any]
    classes: str | None  # file next to routes.json with one vector per label
    as_fast: tuple[str, ...] = ()  # variants whose measured speed is not significantly different
    preprocessing: dict[str, Any] | None = None  # of its images; None: that of the router
    step_only: bool = False  # only policies use it
    order: tuple[int, ...] = ()  # index of each label among the variant's own; empty: the same
    in_space: bool = False  # its embeddings can be brought into the full model's space
    instances: int = 1  # of its models in the server

    @property
    def quickness(self) -> float:
        """Measured speed; without measurements, a number that falls with the multiply-adds."""
        return self.inferences_per_second or 1 / max(1, self.multiply_adds)


@dataclass(frozen=True)
class StepRoute:
    """One variant of a policy: its answer is final if its confidence reaches the threshold."""

    variant: str
    sha256: str
    threshold: float | None  # None: the last one, which always answers
    temperature: float
    end_share: float | None = None  # share of the calibration's samples that end here


@dataclass(frozen=True)
class PolicyRoute:
    """A chain of variants that `saccade calibrate` certified.

    `early` are the classes with which a step but the last may stop; None: all.
    Units: risk and bound are shares of samples, seconds are per sample.
    """

    name: str
    # full: answers that differ from the full model's are lost; labels: wrong ones
    against: Literal["full", "labels"]
    confidence: float
    risk: float
    bound: float
    measure: Literal["top1", "margin", "entropy"]
    full: str  # the variant with which the chain was compared
    seconds: float
    steps: tuple[StepRoute, ...]
    early: tuple[int, ...] | None = None
    embeds: bool = False  # it is for requests for embeddings, all in the full model's space


@dataclass(frozen=True)
class AdaptiveRules:
    """The load-adaptive choice of requests that name no budget.

    `shares` are the shares of the calibration's samples that end at each step, by policy.
    """

    slo_ms: float  # service level objective: the time in which a request should be answered
    floor_budget: float | None  # no smaller variant answers instead of the full model
    shares: dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class MonitorLimit:
    """The null hypothesis for the traffic of one policy, and the chance to reject it in error."""

    rate: float  # of answers that differ from the full model's
    alpha: float
    min_ari: float | None = None  # of segmentations, at which they count as the same answer


@dataclass(frozen=True)
class MonitorRules:
    """Answers of policies that the full model gives too, while the router is idle."""

    share: float  # of the answers
    limits: dict[str, MonitorLimit]  # by policy
    keep: str | None = None  # folder for the sampled images


class Routes(NamedTuple):
    """Everything that the router knows about its model, as `saccade repository` wrote it."""

    model: str
    family: str
    preprocessing: dict[str, Any] | None
    components: dict[str, ComponentRoute]
    variants: tuple[Route, ...]
    policies: tuple[PolicyRoute, ...] = ()
    adaptive: AdaptiveRules | None = None  # None: only a request's own objective adapts
    monitor: MonitorRules = MonitorRules(0.0, {})
    # Policies that the monitor has withdrawn since, by name, with the reason; the router adds them.
    withdrawn: dict[str, str] = {}  # noqa: RUF012

    def of(self, *, embeds: bool) -> "Routes":
        """Return the routes for requests for embeddings in one space, or for all other requests."""
        policies = tuple(policy for policy in self.policies if policy.embeds == embeds)
        variants = tuple(route for route in self.variants if route.in_space or not embeds)
        return self._replace(policies=policies, variants=variants)

    @property
    def answering(self) -> tuple[Route, ...]:
        """The variants that a request may choose."""
        return tuple(route for route in self.variants if not route.step_only)

    def named(self, name: str) -> Route:
        """Return the variant of this name; `saccade preflight` checks that there is one."""
        return next(route for route in self.variants if route.name == name)

    @property
    def in_force(self) -> tuple[PolicyRoute, ...]:
        """The policies that were not withdrawn."""
        return tuple(policy for policy in self.policies if policy.name not in self.withdrawn)

    @property
    def full_policy(self) -> PolicyRoute:
        """The chain of one step: the variant with which all policies are compared."""
        first = self.policies[0]
        full = self.named(first.full)
        step = StepRoute(full.name, full.sha256, None, 1.0)
        return replace(first, name=FULL, risk=0.0, bound=0.0, steps=(step,))


def groups_in_flight(instances: int, routers: int = 1) -> int:
    """Return how many groups of requests a lane gives to its share of its model's instances."""
    share = -(-instances // routers)
    return share + share // SPARE_PART


def read_routes(path: Path) -> Routes:
    """Read the routes of one model.

    Raises: ValueError for another schema or version.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    version = content.get("schema"), content.get("version")
    if version != (SCHEMA, VERSION):
        raise ValueError(
            f"routes.json has schema and version {version}, expected {(SCHEMA, VERSION)}"
        )
    components = {
        role: ComponentRoute(
            inputs=tuple(TensorRoute(**spec) for spec in part["inputs"]),
            outputs=tuple(spec["name"] for spec in part["outputs"]),
            optional=tuple(part["optional"]),
            encoded=tuple(part["encoded"]),
        )
        for role, part in content["parts"].items()
    }
    return Routes(
        model=content["model"],
        family=content["family"],
        preprocessing=content["preprocessing"],
        components=components,
        variants=tuple(Route(**variant) for variant in content["variants"]),
        policies=tuple(
            PolicyRoute(**{**policy, "steps": tuple(StepRoute(**step) for step in policy["steps"])})
            for policy in content.get("policies", ())
        ),
        adaptive=_adaptive(**content["adaptive"]) if "adaptive" in content else None,
        monitor=_monitor(**content.get("monitor", {"share": 0.0, "limits": {}})),
        withdrawn={},
    )


def _adaptive(
    slo_ms: float, floor_budget: float | None, shares: dict[str, list[float]]
) -> AdaptiveRules:
    return AdaptiveRules(slo_ms, floor_budget, {name: (*ends,) for name, ends in shares.items()})


def _monitor(share: float, limits: dict[str, Any], keep: str | None = None) -> MonitorRules:
    return MonitorRules(share, {name: MonitorLimit(**limits[name]) for name in limits}, keep)
