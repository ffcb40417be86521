# SPDX-License-Identifier: Apache-2.0
"""Loss of a NAC's training: every term, with the weight it was given."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from saccade.models.nac import training as nac
from saccade.models.nac.training import listops as nac_listops
from saccade.models.nac.training import recipes as nac_recipes
from saccade.models.training.options import TrainOptions

MODEL = {"modules": 8, "dim": 16, "ffn_dim": 16, "propagator_layers": 1, "module_dropout": 1}
LISTS = {"max_tokens": 8, "depth": 1, "arguments": 3}


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small task on digits-sum, which has every term."""
    whole = nac_recipes.DIGITS_SUM
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nac_recipes, "DIGITS_SUM", replace(whole, batch=6))
        out = tmp_path_factory.mktemp("sums") / "m.safetensors"
        return nac.task(TrainOptions(out, data="digits-sum", set=MODEL, steps=3))


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A small task on ListOps."""
    out = tmp_path_factory.mktemp("lists") / "m.safetensors"
    options = TrainOptions(out, data="listops", set=MODEL | LISTS, steps=3, batch=6)
    return nac_listops.task(options)


def loss_of(task: Any, batch: Any, **weights: float) -> float:
    """The loss of a batch, with the links drawn by one seed."""
    task.extra = {**task.extra, **weights}
    torch.manual_seed(0)
    return task.loss(batch, 0).item()


def test_every_term_has_its_weight(sums: Any) -> None:
    batch = sums.batch(0, np.random.default_rng(0))
    sums.recipe = replace(sums.recipe, label_smoothing=0.1)
    answer = loss_of(sums, batch, counts_weight=0.0, graph_weight=0.0)
    torch.manual_seed(0)
    logits = sums.model(batch["images"])
    expected = F.cross_entropy(logits, batch["labels"], label_smoothing=0.1)
    assert answer == pytest.approx(expected.item(), rel=1e-6)
    counts = sums.auxiliary.loss(batch["counts"]).item()
    graph = sums.model.graph_loss().item()
    assert counts > 1 and graph > 0.1
    whole = loss_of(sums, batch, counts_weight=3.0, graph_weight=0.5)
    assert whole == pytest.approx(answer + 3 * counts + 0.5 * graph, rel=1e-6)


def test_digits_are_counted_and_summed_behind_every_propagator(sums: Any) -> None:
    batch, seen = sums.batch(1, np.random.default_rng(1)), []
    hooks = [
        sums.model.propagators[0].register_forward_hook(lambda m, x, y: seen.append(y)),
        sums.model.head.register_forward_pre_hook(lambda m, x: seen.append(x[0])),
    ]
    sums.model(batch["images"])
    for hook in hooks:
        hook.remove()
    counts, expected = batch["counts"], 0.0
    totals = (counts @ torch.arange(10.0)).long()
    assert totals.max() > 9, "the plain sum, not what is left of it modulo 10"
    by_module, embedding = seen
    for weight, head, states in (
        (1.0, sums.auxiliary.heads[0], embedding[:, None]),
        (0.5, sums.auxiliary.heads[1], by_module),
    ):
        actual = head(states)
        squared = (actual[..., :10] - counts[:, None]).square().mean()
        logs = actual[..., 10:].log_softmax(-1)
        right = torch.stack([row[:, total] for row, total in zip(logs, totals, strict=True)])
        expected += weight * (2 * squared - right.mean()).item()
    assert sums.auxiliary.loss(counts).item() == pytest.approx(expected, rel=1e-5)


def test_lists_inside_lists_are_learned_beside_the_answer(lists: Any) -> None:
    batch = lists.batch(0, np.random.default_rng(0))
    answer = loss_of(lists, batch, values_weight=0.0, graph_weight=0.0)
    torch.manual_seed(0)
    logits = lists.model(batch["characters"], batch["length"])
    assert answer == pytest.approx(F.cross_entropy(logits, batch["labels"]).item(), rel=1e-6)
    tokens, closed = lists.model.tokenizer(batch["characters"], batch["length"]), batch["values"]
    logs = lists.auxiliary.head(tokens).log_softmax(-1)[closed >= 0]
    values = -logs.gather(1, closed[closed >= 0][:, None]).mean().item()
    graph = lists.model.graph_loss().item()
    assert values > 1 and graph > 0.1
    whole = loss_of(lists, batch, values_weight=3.0, graph_weight=0.5)
    assert whole == pytest.approx(answer + 3 * values + 0.5 * graph, rel=1e-5)


def test_a_circuit_that_depends_on_its_input_has_no_prior(tmp_path: Path) -> None:
    options = TrainOptions(
        tmp_path / "m.safetensors", data="listops", set=MODEL | LISTS | {"conditional": True}
    )
    task = nac_listops.task(replace(options, steps=3, batch=6))
    batch = task.batch(0, np.random.default_rng(0))
    assert loss_of(task, batch, graph_weight=0.0) == loss_of(task, batch, graph_weight=9.0)
