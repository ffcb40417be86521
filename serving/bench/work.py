# SPDX-License-Identifier: Apache-2.0
"""The kinds of request to measure for each family: inputs, function and outputs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from saccade.exporter.artefact.variant_files import VariantFiles, encoded, filled
from saccade.exporter.runtimes.runners import Runner
from saccade.models.entry import imported
from saccade.models.families import entry_of
from saccade.models.interface import Arrays
from saccade.serving.bench.load_requests import png_files, request


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
        )
        for role in roles
    ]
