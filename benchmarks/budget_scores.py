# SPDX-License-Identifier: Apache-2.0
"""Score a checkpoint on the test split by budget, with intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from saccade.models.checkpoint import Checkpoint
from saccade.models.data.datasets import Dataset, load_data
from saccade.models.scores.intervals import paired_bootstrap, wilson


def score_budgets(checkpoint: Checkpoint, data: str, budgets: Sequence[float]) -> dict[str, Any]:
    """Return modules, top-1, its 95 % interval and the paired interval to the full model by budget.

    Raises: SaccadeError if the data does not fit the checkpoint or a budget keeps no module.
    """
    test = load_data(data, "test", preprocessing=checkpoint.preprocessing)
    model = checkpoint.build()
    answers: dict[float, np.ndarray] = {}
    rows = {}
    for budget in budgets:
        pruned = model.prune(budget)
        answers[budget] = _right(pruned.fold(), test)
        rows[f"{budget:g}"] = {
            "modules": pruned.config.modules,
            "top_1": float(answers[budget].mean()),
            "interval": wilson(int(answers[budget].sum()), len(test.labels)),
            "minus_full": float(answers[budget].mean() - answers[budgets[0]].mean()),
            "minus_full_interval": paired_bootstrap(answers[budget], answers[budgets[0]], 0),
        }
    return {"n": len(test.labels), "data_sha256": test.sha256, "budgets": rows}


def _right(model: torch.nn.Module, test: Dataset) -> np.ndarray:
    images, labels = torch.from_numpy(test.images), torch.from_numpy(test.labels)
    with torch.inference_mode():
        predicted = [model(images[i : i + 100]).argmax(1) for i in range(0, len(labels), 100)]
    return (torch.cat(predicted) == labels).numpy()
