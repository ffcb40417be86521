# SPDX-License-Identifier: Apache-2.0
"""Threads of one run of each model, chosen by the cores of the server and by what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from saccade.core.machine import cores
from saccade.core.schema import typed
from saccade.core.sizes import counted
from saccade.exporter.artefact.frontier import FrontierEntry
from saccade.exporter.artefact.manifest import VariantFiles
from saccade.serving.repository.options import RepositoryOptions


@dataclass(frozen=True)
class ThreadRule:
    """How many threads one run of a model has on a server with some number of cores.

    A model that is alone takes all cores. If other models may run at the same time, one run takes
    at most half of them, so that a cheap request always finds cores that an expensive one does not
    use. The instances of a model share its cores. Threads that were measured to gain nothing are
    left to others.
    """

    given: int | None = None  # by `--threads`; 0: as many as the runtime takes by itself
    alone: bool = True  # no other model answers requests at the same time
    enough: int | None = None  # more threads than this were measured not to be faster
    instances: int = 1  # of the model

    def on(self, cores: int) -> int:
        """Return the threads of one run on that many cores."""
        if self.given is not None:
            return self.given
        share = max(1, cores // (self.instances if self.alone else 2 * self.instances))
        return min(share, self.enough or share)

    def why(self, cores: int) -> str:
        """Return the reason for that number, as the second half of a sentence."""
        if self.given is not None:
            return "as given by --threads"
        if self.on(cores) == self.enough:
            return "more were measured not to be faster"
        of = counted(cores, "core")
        others = "it is alone on" if self.alone else "other models share with it"
        shared = f", by {self.instances} instances" if self.instances > 1 else ""
        return f"{others} {of}{shared}"


def thread_rules(
    variants: Sequence[VariantFiles],
    measured: Mapping[str, FrontierEntry],
    options: RepositoryOptions,
) -> dict[str, ThreadRule]:
    """Return the rule of each component, by its name."""
    parts = [(variant, role) for variant in variants for role in variant.components]
    alone, rules = is_alone(variants), {}
    for variant, role in parts:
        entry = measured.get(variant.name)
        # A GPU computes; the one thread only starts its work.
        given = 1 if options.threads is None and options.on_gpu else options.threads
        rules[variant.components[role].variant.name] = ThreadRule(
            given=given,
            alone=alone,
            enough=entry.enough_threads(role) if entry else None,
            instances=options.instance_count,
        )
    return rules


def is_alone(variants: Sequence[VariantFiles]) -> bool:
    """Return whether requests to these variants never run at the same time.

    Variants of one budget that differ in precision count as one: a router sends the requests of a
    budget to only one of them.
    """
    return (
        len({(one.main.variant.setting, role) for one in variants for role in one.components}) < 2
    )


def described(rules: Mapping[str, ThreadRule], cores: int) -> dict[str, Any]:
    """Return what `saccade.json` says: the choice for each model, its reason, and its rule."""
    return {
        name: {"threads": rule.on(cores), "because": rule.why(cores), "rule": asdict(rule)}
        for name, rule in rules.items()
    }


def read_rules(content: Any) -> dict[str, ThreadRule]:
    """Return the rules from `saccade.json`.

    Raises: SaccadeError for a wrong type, or a missing key.
    """
    models = typed(dict[str, dict[str, Any]], content, "threads: ")
    rules = {name: one.get("rule") for name, one in models.items()}
    read: dict[str, ThreadRule] = typed(dict[str, ThreadRule], rules, "threads: ")
    return read


def chosen_again(rules: Mapping[str, ThreadRule], planned: int, here: int) -> dict[str, int]:
    """Return the threads of each model that has another number on `here` cores than was planned."""
    return {
        name: rule.on(here) for name, rule in rules.items() if rule.on(here) != rule.on(planned)
    }


def served_cores(options: RepositoryOptions) -> int:
    """Return the cores of the server: as given, else those of this machine."""
    return cores() if options.cores is None else options.cores
