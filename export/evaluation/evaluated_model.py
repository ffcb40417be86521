# SPDX-License-Identifier: Apache-2.0
"""Models under evaluation: a checkpoint or an exported variant, as functions of named arrays."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, Protocol, cast

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import BY_CLASS, Manifest, label_order
from saccade.exporter.artefact.variant import choose_budgets
from saccade.exporter.graph.trial import refuse_untried
from saccade.exporter.runtimes.runners import Runner, run_in_batches, torch_runner
from saccade.exporter.runtimes.runtime import Runtime, has_custom_ops, loaded, ops_of
from saccade.models.budget import BudgetLike
from saccade.models.checkpoint import Checkpoint
from saccade.models.checkpoint_folder import checkpoint_name
from saccade.models.checkpoint_format import AUTHORS_DATA, GENERATED_DATA
from saccade.models.data.calibration import at_budget
from saccade.models.interface import Arrays, Family, TensorSpec
from saccade.models.preprocessing import Preprocessing
from saccade.models.scores.results import EvaluationResult, Score
from saccade.plugins.contract import Ops

_BATCH = 32


class Origin(Protocol):
    """Where samples come from; the hash is that of the whole split."""

    @property
    def name(self) -> str: ...
    @property
    def sha256(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def skipped(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class DataSplit:
    """One split of the data in the form of a task, with its origin."""

    name: str
    digest: Callable[[], str]  # images that were not scored are read for it
    split: str = ""
    skipped: int = 0  # unreadable rows that were left out

    @property
    def sha256(self) -> str:
        """Return the hash of the split."""
        return self.digest()


def origin(data: Origin) -> dict[str, Any]:
    """Return the fields of a `DataSplit` made from other data."""
    return {
        "name": data.name,
        "digest": cache(lambda: data.sha256),
        "split": data.split,
        "skipped": data.skipped,
    }


def chunks(count: int, size: int) -> Iterator[np.ndarray]:
    """Yield the rows of all samples, a few at a time: their answers may need much memory."""
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))


@dataclass(frozen=True)
class EvaluatedFunction:
    """One component of a model, run by torch or a runtime."""

    inputs: tuple[TensorSpec, ...]
    run: Runner
    order: tuple[int, ...] = ()  # of the classes among those of `run`; empty: the same

    def __call__(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs for any number of samples."""
        return run_in_batches(self.answer, inputs, _BATCH)

    def answer(self, inputs: Arrays) -> dict[str, np.ndarray]:
        """Return the outputs for one batch."""
        outputs, classes = self.run(inputs), list(self.order)
        if not classes:
            return outputs
        return {
            name: array[:, classes] if name in BY_CLASS else array
            for name, array in outputs.items()
        }


@dataclass(frozen=True)
class EvaluatedModel:
    """One variant: its components by role, and its metadata."""

    name: str
    family: str
    sha256: str
    runtime_metadata: dict[str, Any]
    labels: tuple[str, ...]
    preprocessing: Preprocessing | None
    components: dict[str, EvaluatedFunction]
    ops: Ops = None  # how its custom ops run

    def component(self, *roles: str) -> EvaluatedFunction:
        """Return the component with the first of these roles that the model has.

        Raises: SaccadeError if it has none of them.
        """
        for role in roles:
            if role in self.components:
                return self.components[role]
        raise SaccadeError(
            f"{self.name}: found the components {sorted(self.components)}, expected one of "
            f"{sorted(roles)}. If files are missing from the folder, export the checkpoint again; "
            "otherwise choose another --task."
        )

    def images(self) -> Preprocessing:
        """Return the preprocessing of images.

        Raises: SaccadeError if the model takes no image.
        """
        if self.preprocessing is None:
            raise SaccadeError(f"{self.name}: takes no image. Choose another --task or --data.")
        return self.preprocessing

    def result(
        self,
        task: str,
        data: Origin,
        scores: Iterable[Score],
        samples: np.ndarray,
        protocol: str = "",
    ) -> EvaluationResult:
        """Return the scores of a task on this data; `samples` as in `EvaluationResult`."""
        return EvaluationResult(
            self.name,
            task,
            data.name,
            data.sha256,
            tuple(scores),
            samples.astype(np.float64),
            protocol,
            data.split,
            data.skipped,
        )


def subjects_of_folder(
    folder: ArtefactFolder, runtime: Runtime, *, kernels: bool = True, threads: int = 1
) -> list[EvaluatedModel]:
    """Load the variants of an artefact folder in a runtime, each with this many threads.

    Raises: SaccadeError for a file that cannot be opened within the limits or cannot run here.
    """
    refuse_untried(folder, folder.manifests)
    groups = groupby(
        folder.manifests,
        key=lambda manifest: (manifest.variant.setting, manifest.variant.precision),
    )
    ops = ops_of(runtime, folder.manifests, kernels=kernels)
    return [_exported(folder, list(manifests), runtime, ops, threads) for _, manifests in groups]


def subjects_of_checkpoint(
    checkpoint: Checkpoint, budget: Sequence[BudgetLike] = ()
) -> list[EvaluatedModel]:
    """Build a checkpoint at these budgets, or at the largest if none is given.

    Raises: SaccadeError for a budget that the family does not have.
    """
    model = cast(Family, checkpoint.build())
    budgets = choose_budgets(model, budget) if budget else model.budgets()[:1]
    return [
        _built(
            at_budget(checkpoint, budget),
            model.at(budget),
            f"{checkpoint_name(checkpoint.path)}-{budget.label}",
        )
        for budget in budgets
    ]


def trained_on(checkpoint: Checkpoint | None) -> str | None:
    """Return the training data named in a checkpoint's card, if saccade generates it.

    Raises: SaccadeError for a converted classifier of images, whose data only the user has.
    """
    data = checkpoint.card.get("data") if checkpoint else None
    if checkpoint and data == AUTHORS_DATA and checkpoint.labels and checkpoint.preprocessing:
        raise SaccadeError(
            f"{checkpoint_name(checkpoint.path)} was converted, so its training data is not known "
            "here. Pass labeled images with --data FOLDER, with one subfolder per label."
        )
    return data if data in GENERATED_DATA else None


def _exported(
    folder: ArtefactFolder,
    manifests: Sequence[Manifest],
    runtime: Runtime,
    ops: Ops,
    threads: int,
) -> EvaluatedModel:
    first = manifests[0]
    runners = loaded(runtime, folder, manifests, ops, threads=threads)
    # Members of a group may have the labels in another order.
    order = label_order(folder.variants[0].labels, first.labels)
    components = {
        manifest.variant.role: EvaluatedFunction(
            manifest.inputs, runners[manifest.variant.role], order
        )
        for manifest in manifests
    }
    entry = first.variant
    return EvaluatedModel(
        f"{entry.model}-{entry.setting}-{entry.precision}",
        entry.family,
        first.file.sha256,
        first.facts,
        folder.variants[0].labels if order else first.labels,
        first.preprocessing,
        components,
        ops if has_custom_ops(manifests) else None,
    )


def _built(checkpoint: Checkpoint, model: Family, name: str) -> EvaluatedModel:
    folded = model.fold()
    components = {
        component.role: EvaluatedFunction(
            component.inputs,
            torch_runner(folded, component.role, (*component.outputs, *component.optional)),
        )
        for component in cast(Family, folded).components()
    }
    return EvaluatedModel(
        name,
        checkpoint.family,
        checkpoint.sha256,
        model.runtime_metadata(),
        checkpoint.labels,
        checkpoint.preprocessing,
        components,
    )
