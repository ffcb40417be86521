# SPDX-License-Identifier: Apache-2.0
"""The kinds of request to measure, and the open variants that answer them with some threads."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from saccade.core.machine import cores
from saccade.exporter.artefact.frontier import enough_threads
from saccade.exporter.artefact.manifest import VariantFiles, encoded, filled
from saccade.exporter.runtimes.runners import Runner
from saccade.exporter.runtimes.runtime import Runtime
from saccade.models.entry import imported
from saccade.models.families import entry_of
from saccade.models.interface import Arrays
from saccade.serving.bench.load_requests import png_files, request
from saccade.serving.repository.threads import ThreadRule, is_alone

_BATCH = 8  # samples per call, to compare numbers of threads
_LEAST_S, _LONG_S = 0.05, 1.0  # measure at least so long; a longer call is repeated once only
Key = tuple[str, str]  # variant and role
# Opens the components of a variant with a number of threads; by role.
Load = Callable[[VariantFiles, int], Mapping[str, Runner]]


@dataclass(frozen=True)
class Work:
    """One kind of request of one variant.

    Shapes: inputs [n ...], one row per request.
    """

    variant: str
    role: str  # empty for plain requests
    setting: str
    precision: str
    run: Runner
    inputs: Mapping[str, np.ndarray]
    answers: tuple[str, ...]
    model: str | None  # model that takes the inputs directly; None if only the router can
    router: str
    encoded: tuple[str, ...] = ()  # inputs that the router takes as image files
    filled: tuple[str, ...] = ()  # inputs that the router fills in itself
    step_only: bool = False  # the router uses it in policies only
    varied: bool = False  # one batch is measured as well as another: all rows cost the same

    @property
    def key(self) -> tuple[str, str]:
        """Variant and role."""
        return self.variant, self.role

    @property
    def title(self) -> str:
        """Title for messages."""
        return f"{self.variant} {self.role}".rstrip()

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def row(self, index: int) -> dict[str, np.ndarray]:
        """Return the inputs of one request."""
        return {name: array[index : index + 1] for name, array in self.inputs.items()}

    def direct(self, index: int, *outputs: str) -> bytes:
        """Return one serialized request to the variant itself, with raw tensors."""
        assert self.model is not None
        return request(self.model, self.row(index), outputs or self.answers)

    def routed(
        self, index: int, *outputs: str, parameters: Mapping[str, str] | None = None
    ) -> bytes:
        """Return one serialized request to the router, as a caller sends it.

        The default `parameters` choose this variant.
        """
        row = {name: array for name, array in self.row(index).items() if name not in self.filled}
        row |= {name: png_files(row[name]) for name in self.encoded}
        chosen = parameters or {"budget": self.setting}
        return request(self.router, row, outputs or self.answers, chosen)


def works_of(
    variant: VariantFiles, inputs: Mapping[str, Arrays], runners: Mapping[str, Runner]
) -> list[Work]:
    """Return the kinds of request to measure for one variant, plain requests first.

    Shapes: inputs by role, [n ...] each; runners by role.
    """
    entry = variant.main.variant
    family = entry_of(entry.family)
    whole = imported(family.whole)(variant.runtime_metadata, runners) if family.whole else None
    roles = [entry.role, *(role for role in family.beside if role in runners)]
    return [
        Work(
            variant=variant.name,
            role="" if role == entry.role else role,
            setting=entry.setting,
            precision=entry.precision,
            run=whole or runners[role],
            inputs=dict(inputs[role]),
            answers=family.answers,
            model=None if whole else variant.components[role].variant.name,
            router=entry.model,
            encoded=encoded(variant.components[role]),
            filled=filled(variant.components[role]),
            step_only=variant.main.step_only,
        )
        for role in roles
    ]


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


@dataclass(frozen=True)
class OpenVariant:
    """A variant that is open to be measured, and the inputs of its requests.

    Shapes: inputs by role and name, [n ...] each.
    """

    variant: VariantFiles
    inputs: Mapping[str, Arrays]
    runners: Mapping[str, Runner]  # by role
    load: Load = field(repr=False)

    @property
    def works(self) -> list[Work]:
        """The kinds of request, plain requests first."""
        return works_of(self.variant, self.inputs, self.runners)

    def rates(self, threads: Sequence[int]) -> dict[Key, dict[int, float]]:
        """Return the speed of each kind of request with each number of threads.

        The variant is open with the first number. One further session is open at a time.
        """
        rates: dict[Key, dict[int, float]] = {work.key: {} for work in self.works}
        for count in threads:
            first = count == threads[0]
            runners = self.runners if first else self.load(self.variant, count)
            for work in replace(self, runners=runners).works:
                rates[work.key][count] = rate_of(work.run, work.inputs)
        return rates

    def with_threads(self, threads: Threads) -> "OpenVariant":
        """Return it with the components opened again that have another number of threads."""
        runners = dict(self.runners)
        for role, manifest in self.variant.components.items():
            count = threads.of((self.variant.name, "" if manifest is self.variant.main else role))
            if count != threads.share:
                runners[role] = self.load(self.variant, count)[role]
        return replace(self, runners=runners)


def rate_of(run: Runner, inputs: Arrays) -> float:
    """Return the highest speed of a few calls, which other programs disturb least.

    Units:  inferences per second.
    """
    batch = {name: array[np.arange(_BATCH) % len(array)] for name, array in inputs.items()}
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
    return round(_BATCH / least, 2)
