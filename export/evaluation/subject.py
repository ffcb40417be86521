# SPDX-License-Identifier: Apache-2.0
"""What is evaluated: a checkpoint or an exported variant, as functions of named arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import numpy as np

from saccade.errors import SaccadeError
from saccade.export.artefact.folder import ArtefactFolder
from saccade.export.artefact.manifest import Manifest
from saccade.export.artefact.variant import choose_settings
from saccade.export.graph.trial import refuse_untried
from saccade.export.runtimes.runners import Runner, run_in_batches, torch_runner
from saccade.export.runtimes.runtime import Runtime, has_custom_ops, loaded, ops_of
from saccade.models.budget import BudgetLike
from saccade.models.checkpoint import Checkpoint
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


def subjects_of_folder(
    folder: ArtefactFolder, runtime: Runtime, *, kernels: bool = True
) -> list[Subject]:
    """The variants of an artefact folder in a runtime.

    Raises: SaccadeError for a file that cannot be opened within limits, or does not run here.
    """
    refuse_untried(folder, folder.manifests)
    groups = groupby(
        folder.manifests, key=lambda each: (each.variant.setting, each.variant.precision)
    )
    ops = ops_of(runtime, folder.manifests, kernels=kernels)
    return [_exported(folder, list(manifests), runtime, ops) for _, manifests in groups]


def subjects_of_checkpoint(
    checkpoint: Checkpoint, budget: Sequence[BudgetLike] = ()
) -> list[Subject]:
    """A checkpoint at these budgets, at the largest where none is given.

    Raises: SaccadeError for a budget that the family does not know.
    """
    model = cast(Family, checkpoint.build())
    settings = choose_settings(model, budget) if budget else model.settings()[:1]
    return [
        _built(checkpoint, model.at(setting), f"{checkpoint.path.stem}-{setting.label}")
        for setting in settings
    ]


def trained_on(checkpoint: Checkpoint | None) -> str | None:
    """The data that a checkpoint learned by its card, if it is made here."""
    data = checkpoint.card.get("data") if checkpoint else None
    return data if data in _GENERATED else None


def _exported(
    folder: ArtefactFolder, manifests: Sequence[Manifest], runtime: Runtime, ops: Ops
) -> Subject:
    first = manifests[0]
    runners = loaded(runtime, folder, manifests, ops)
    parts = {
        each.variant.role: Function(each.inputs, runners[each.variant.role]) for each in manifests
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
