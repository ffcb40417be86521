# SPDX-License-Identifier: Apache-2.0
"""Inputs for measuring a variant, from the same data that it is scored on."""

from collections.abc import Callable

import numpy as np

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.variant_files import VariantFiles
from saccade.exporter.evaluation.tasks import tasks_of
from saccade.models.entry import imported
from saccade.models.preprocessing import Preprocessing

Inputs = dict[str, dict[str, np.ndarray]]  # by role and name


def inputs_of(variant: VariantFiles, data: str, count: int) -> Inputs:
    """Return the first test samples as inputs of the components, by role.

    Shapes: each [n ...] with n at most `count`.
    Raises: SaccadeError if no data fits the variant.
    """
    task = next(iter(tasks_of(variant.main.variant.family).values()))
    load: Callable[[VariantFiles, str, int], Inputs] = imported(task.inputs)
    return load(variant, data, count)


def images_of(variant: VariantFiles) -> Preprocessing:
    """Return the preprocessing of the variant's images.

    Raises: SaccadeError if it takes no image.
    """
    if variant.preprocessing is None:
        names = sorted(spec.name for spec in variant.main.inputs)
        raise SaccadeError(
            f"{variant.name}: takes {', '.join(names)}, but saccade has no such data to measure "
            "with. Measure a model that takes images."
        )
    return variant.preprocessing
