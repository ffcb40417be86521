# SPDX-License-Identifier: Apache-2.0
"""What is evaluated: a checkpoint or an exported variant, as functions of named arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np

from saccade.errors import SaccadeError
from saccade.export.artefact.manifest import Manifest, read_folder
from saccade.export.artefact.variant import choose_settings
from saccade.export.graph.trial import refuse_untried
from saccade.export.runtimes.runners import Runner, run_in_batches, torch_runner
from saccade.export.runtimes.runtime import DEFAULT, Runtime, has_custom_ops, ops_of, runtime_named
from saccade.models.budget import BudgetLike
from saccade.models.checkpoint import Checkpoint, load
from saccade.models.interface import Arrays, Family, TensorSpec
from saccade.models.preprocessing import Preprocessing
from saccade.plugins.execution import Ops

_BATCH = 32
_GENERATED = ("digits", "digits-sum", "shapes", "tetrominoes", "listops")


@dataclass(frozen=True)
class Function:
    """One part of a model, whatever runs it."""

    inputs: tuple[TensorSpec, ...]
    run: Runner

    def __call__(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """The answers for any number of samples."""
        return run_in_batches(self.run, inputs, _BATCH)


@dataclass(frozen=True)
class Subject:
    """One variant: its parts by role, and what is known of it."""

    name: str
    family: str
    sha256: str
    facts: dict[str, Any]
    labels: tuple[str, ...]
    preprocessing: Preprocessing | None
    parts: dict[str, Function]
    ops: Ops = None  # how its custom ops run

    def part(self, *roles: str) -> Function:
        """The first of these roles that it has.

        Raises: SaccadeError if it has none of them.
        """
        for role in roles:
            if role in self.parts:
                return self.parts[role]
        raise SaccadeError(
            f"{self.name}: found the parts {sorted(self.parts)}, this task needs one of "
            f"{sorted(roles)}. If files are missing from the folder, export the checkpoint again; "
            "otherwise choose another --task."
        )

    def images(self) -> Preprocessing:
        """What the image is that it takes.

        Raises: SaccadeError if it takes none.
        """
        if self.preprocessing is None:
            raise SaccadeError(f"{self.name}: takes no image. Choose another --task or --data.")
        return self.preprocessing


def subjects_of(
    path: Path,
    budget: Sequence[BudgetLike] = (),
    runtime: str = DEFAULT,
    *,
    kernels: bool = True,
) -> list[Subject]:
    """The variants of an artefact folder in a runtime, or of a checkpoint at these budgets (all).

    Raises: SaccadeError if there is neither.
    """
    if path.is_dir():
        found = read_folder(path)
        refuse_untried(path, found)
        groups = groupby(found, key=lambda each: (each.variant.setting, each.variant.precision))
        runs = runtime_named(runtime)
        ops = ops_of(runs, found, kernels=kernels)
        return [_exported(path, list(manifests), runs, ops) for _, manifests in groups]
    checkpoint = load(path)
    model = cast(Family, checkpoint.build())
    settings = choose_settings(model, budget) if budget else model.settings()[:1]
    return [
        _built(checkpoint, model.at(setting), f"{path.stem}-{setting.label}")
        for setting in settings
    ]


def trained_on(path: Path) -> str | None:
    """The data that a checkpoint, or that of a folder, learned by its card, if it is made here."""
    checkpoint = path / read_folder(path)[0].parent.name if path.is_dir() else path
    data = load(checkpoint).card.get("data") if checkpoint.is_file() else None
    return data if data in _GENERATED else None


def _exported(folder: Path, manifests: Sequence[Manifest], runtime: Runtime, ops: Ops) -> Subject:
    first = manifests[0]
    parts = {
        each.variant.role: Function(each.inputs, runtime.load(folder, each, ops))
        for each in manifests
    }
    entry = first.variant
    return Subject(
        f"{entry.model}-{entry.setting}-{entry.precision}",
        entry.family,
        first.file.sha256,
        first.facts,
        first.labels,
        first.preprocessing,
        parts,
        ops if has_custom_ops(manifests) else None,
    )


def _built(checkpoint: Checkpoint, model: Family, name: str) -> Subject:
    folded = model.fold()
    parts = {
        part.role: Function(
            part.inputs, torch_runner(folded, part.role, (*part.outputs, *part.optional))
        )
        for part in cast(Family, folded).parts()
    }
    return Subject(
        name,
        checkpoint.family,
        checkpoint.sha256,
        model.facts(),
        checkpoint.labels,
        checkpoint.preprocessing,
        parts,
    )
