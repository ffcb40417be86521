# SPDX-License-Identifier: Apache-2.0
"""Speed of each variant by number of threads, and the variants opened with the number to serve."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from saccade.core.machine import cores
from saccade.exporter.artefact.frontier import enough_threads
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.evaluated_model import EvaluatedFunction, EvaluatedModel
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.runtime import Runtime
from saccade.models.interface import Arrays
from saccade.serving.bench.work import Work, works_of
from saccade.serving.repository.threads import ThreadRule, is_alone

BATCH = 8  # samples per call
_LEAST_S, _LONG_S = 0.05, 1.0  # measure at least so long; a longer call is repeated once only
Key = tuple[str, str]  # variant and role
# Opens the components of a variant with a number of threads; by role.
Load = Callable[[VariantFiles, int], Mapping[str, Runner]]


@dataclass(frozen=True)
class Threads:
    """How many threads each kind of request runs with, and what was measured with others.

    Units: rates in inferences per second, by number of threads.
    """

    share: int  # without measurements
    rates: Mapping[Key, Mapping[int, float]] = field(default_factory=dict)

    def of(self, key: Key) -> int:
        """Return the threads to serve with: the share, or fewer if more are not faster."""
        rates = self.rates.get(key) or self.rates.get((key[0], ""), {})
        return min(self.share, enough_threads(rates) or self.share)

    def rate(self, key: Key) -> float:
        """Return the speed with these threads. Units: inferences per second."""
        return self.rates[key][self.of(key)]


def share_of(variants: Sequence[VariantFiles], runtime: Runtime) -> int:
    """Return the threads of one run in a repository of these variants on this machine."""
    return 1 if runtime.gpu_only else ThreadRule(alone=is_alone(variants)).on(cores())


def counts(runtime: Runtime, share: int) -> tuple[int, ...]:
    """Return the numbers of threads to measure: the share, powers of two, and all cores."""
    most = 1 if runtime.gpu_only else cores()
    powers = (2**power for power in range(most.bit_length()))
    others = {most, *(power for power in powers if power < most)} - {share}
    return share, *sorted(others)


def measure_threads(
    variant: VariantFiles, works: Sequence[Work], threads: Sequence[int], load: Load
) -> dict[Key, dict[int, float]]:
    """Return the speed of a variant's works with each number of threads, in batches of eight.

    `works` have the first number of threads. One further session is open at a time.
    """
    rates: dict[Key, dict[int, float]] = {work.key: {} for work in works}
    for count in threads:
        own = works
        if count != threads[0]:
            inputs = {work.role or variant.main.variant.role: work.inputs for work in works}
            own = works_of(variant, inputs, load(variant, count))
        for work in own:
            rates[work.key][count] = rate_of(work.run, work.inputs)
    return rates


def rate_of(run: Runner, inputs: Arrays) -> float:
    """Return the highest speed of a few calls, which other programs disturb least.

    Units:  inferences per second.
    """
    batch = {name: array[np.arange(BATCH) % len(array)] for name, array in inputs.items()}
    began = time.perf_counter()
    run(batch)  # the first call also allocates memory
    least, end = time.perf_counter() - began, time.perf_counter() + _LEAST_S
    repeats = 1 if least > _LONG_S else 3
    while repeats > 0 or time.perf_counter() < end:
        start = time.perf_counter()
        run(batch)
        least, repeats = min(least, time.perf_counter() - start), repeats - 1
        if least > _LONG_S:
            break
    return round(BATCH / least, 2)


def opened_with(
    models: Sequence[EvaluatedModel],
    variants: Sequence[VariantFiles],
    threads: Threads,
    load: Load,
) -> list[EvaluatedModel]:
    """Return the models with the components opened again that have another number of threads."""
    opened = []
    for model, variant in zip(models, variants, strict=True):
        parts = dict(model.components)
        for role, manifest in variant.components.items():
            count = threads.of((model.name, "" if manifest is variant.main else role))
            if count != threads.share:
                parts[role] = EvaluatedFunction(parts[role].inputs, load(variant, count)[role])
        opened.append(replace(model, components=parts))
    return opened
