# SPDX-License-Identifier: Apache-2.0
"""A sparse circuit: the strongest links, and the same function as a mask on all the others."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_gate import FEW_SAMPLES
from small_nac import BESIDE, KINDS, PAPER, Largest, given, nac
from tiny import tiny_nac
from torch import Tensor

from saccade.core.errors import SaccadeError
from saccade.exporter.artefact.variant import choose_budgets
from saccade.exporter.export import export
from saccade.exporter.export_options import ExportOptions
from saccade.models.families import config_class
from saccade.models.nac import links
from saccade.models.nac.config import PRESETS
from saccade.models.nac.model import NAC, NACConfig

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "tokens": KINDS["tokens"],
    "frozen": {"connectivity": "frozen"},
    "authors": PAPER,
    "authors, beside": BESIDE,
    "truncated": {"truncate": 0.9, "epsilon_learned": True},
    "one head": {"heads": 1, "modulation": False},
}


def senders(model: NAC) -> int:
    return model.config.modules + model.config.read_in_modules


def distances(model: NAC) -> Tensor:
    """Of processor modules to all senders, written out."""
    made = model.generator()
    rows = [made.signatures] + [made.read_in_signatures] * (made.read_in_signatures is not None)
    unit = torch.cat(rows)
    unit = unit / unit.norm(dim=-1, keepdim=True)
    return 1 - unit[: model.config.modules] @ unit.T


@pytest.mark.parametrize("kept", (1, 5))
@pytest.mark.parametrize("case", CASES)
def test_sparse_is_dense_with_the_weaker_links_masked(case: str, kept: int) -> None:
    model = nac(**CASES[case])
    arguments = given(model)
    nearest = distances(model).topk(kept, largest=False).indices
    assert all(row in nearest[row] for row in range(model.config.modules))
    mask = torch.full((model.config.modules, senders(model)), -math.inf).double()
    mask.scatter_(1, nearest, 0.0)
    sparse = model.sparse(kept)
    actual = sparse.details(**arguments)
    dense = model.details(**arguments)
    for propagator in model.propagators:
        propagator.register_forward_pre_hook(lambda _, given: (*given[:-1], given[-1] + mask))
    expected = model.details(**arguments)
    for name in ("logits", "embedding", "attention"):
        assert (actual[name] - expected[name]).abs().max() < 1e-12, name
    assert (actual["logits"] - dense["logits"]).abs().max() > 1e-4
    processors = mask[:, : model.config.modules]
    assert torch.equal(actual["link"][0], dense["link"][0] * processors.exp())


@pytest.mark.parametrize("kept", (1, 5))
@pytest.mark.parametrize("case", CASES)
def test_folded_in_parts_or_whole_it_is_the_same_function(
    case: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sparse = nac(**CASES[case]).sparse(kept)
    arguments = given(sparse)
    expected = sparse.details(**arguments)
    folded = sparse.fold()
    for at_once in (links._AT_ONCE, 3 * 7 * kept * sparse.config.dim, 1):
        monkeypatch.setattr(links, "_AT_ONCE", at_once)
        actual = folded.details(**arguments)
        for name, value in expected.items():
            assert (actual[name] - value).abs().max() < 1e-10, (at_once, name)


def exported(model: torch.nn.Module) -> Callable[..., Tensor]:
    arguments, axis = given(model, batch=3), {0: torch.export.Dim("b", min=1)}
    with torch.no_grad():
        shapes = dict.fromkeys(arguments, axis)
        return torch.export.export(model, (), arguments, dynamic_shapes=shapes).module()


@pytest.mark.parametrize("case", ("default", "authors, beside"))
def test_what_is_exported_is_the_same_function_for_a_free_batch(case: str) -> None:
    sparse = nac(**CASES[case]).sparse(3)
    made = exported(sparse.fold())
    for batch in (1, 5):
        other = given(sparse, batch=batch, seed=4)
        assert (made(**other) - sparse(**other)).abs().max() < 1e-10


def test_nothing_of_all_pairs_is_made() -> None:
    dense = nac(modules=96)
    arguments, sparse = given(dense, batch=1), dense.sparse(3)
    dense_export, sparse_export = exported(dense.fold()), exported(sparse.fold())
    runs = ((sparse, True), (sparse.fold(), False), (dense_export, True), (sparse_export, False))
    for run, makes in runs:
        with torch.no_grad(), Largest() as largest:
            run(**arguments)
        assert (largest.numbers >= 96 * 96) == makes


def test_equal_links_are_kept_by_place_and_a_modules_own_always() -> None:
    model = nac(modules=6)
    with torch.no_grad():
        model.generator.signatures.copy_(torch.ones(6, 5))
    rows = [[0, 1], [0, 1], [0, 2], [0, 3], [0, 4], [0, 5]]
    assert model.sparse(2).neighbors.tolist() == rows
    assert model.float().sparse(1).neighbors.tolist() == [[row] for row in range(6)]


def test_links_and_modules_are_left_out_together() -> None:
    model = nac(**PAPER)
    small = model.at(model.budget("k3b0500"))
    expected = model.prune(0.5).sparse(3)
    assert small.config == replace(model.config, modules=8, links=3) == expected.config
    arguments = given(model)
    assert torch.equal(small(**arguments), expected(**arguments))
    assert torch.equal(model.sparse(3).prune(0.5)(**arguments), expected(**arguments))
    few = model.sparse(3).prune(0.125)  # of two modules
    assert few.config == replace(model.config, modules=2)
    beside = nac(**BESIDE)
    assert beside.at(beside.budget("k7b0250")).config.modules == 4
    patches = nac()
    image = patches.at(patches.budget("r6k3"))
    assert (image.config.height_px, image.config.links) == (6, 3)


def test_training_hears_all_and_ranking_chooses_again() -> None:
    model = nac(kernel_draw="none")
    sparse, arguments = model.sparse(4), given(model)
    assert torch.equal(sparse.train()(**arguments), model.train()(**arguments))
    order = model.module_order
    with pytest.raises(SaccadeError, match="Use prune"):
        sparse.eval()(**arguments, modules=order[:5])
    assert sparse.train()(**arguments, modules=order[:5]).isfinite().all()
    before = sparse.neighbors.clone()
    with torch.no_grad():
        sparse.generator.signatures.copy_(torch.randn(16, 5, generator=torch.Generator()))
    sparse.eval().rank_modules()
    nearest = distances(sparse).topk(4, largest=False).indices.sort(-1).values
    assert torch.equal(sparse.neighbors, nearest) and not torch.equal(before, nearest)
    again = NAC(sparse.config, fresh=False).double().eval()
    again.load_state_dict(sparse.state_dict())
    assert torch.equal(again(**arguments), sparse(**arguments))
    born = NAC(NACConfig(links=4))
    assert torch.equal(born.neighbors, NAC(NACConfig()).sparse(4).neighbors)


def test_a_budget_says_what_it_keeps() -> None:
    config = PRESETS["imagenet"]
    budget = config.budget(" k16 ")
    assert (budget.label, budget.kept, budget.total, budget.unit) == ("k16", 16, 1024, "links")
    per_link, rest = 2 * 128, 4 * 128 * 128 + 2 * 128 * 256
    share = (rest + 16 * per_link) / (rest + 1024 * per_link)
    assert budget.share == pytest.approx(share)
    half = config.budget("k16b0500")
    assert (half.label, half.kept, half.total) == ("k16b0500", 16, 512)
    assert half.share == pytest.approx(share / 2)
    assert config.budget("r196k16b0500").label == "r196k16b0500"
    chosen = choose_budgets(config, ("k16", "1", "k16b0500", "1/64"))  # which keeps 16 modules
    assert [each.label for each in chosen] == ["b1000", "k16", "k16b0500", "b0016"]
    with pytest.raises(SaccadeError, match="would be the same"):
        choose_budgets(config, ("k16", "k16b1000"))


@pytest.mark.parametrize(
    ("changes", "text", "words"),
    [
        ({}, "k0", r"'k0': keeps 0 links of a module, which has 64.*1 to 63.*--budget k63"),
        ({}, "k64", "keeps 64 links.*1 to 63"),
        ({}, "k65", "keeps 65 links.*1 to 63"),
        ({}, "k32b0500", "keeps 32 links.*which has 32.*1 to 31"),
        ({"read_in_modules": 5, "read_in_codes": "own"}, "k69", "which has 69"),
        ({"modules": 1}, "k1", "which has 1 with its own. Here, leave links out"),
        ({"links": 8}, "k8", "which has 8.*1 to 7"),
        ({"connectivity": "dense"}, "k4", "no links that are stronger.*Keep fewer modules"),
        ({"conditional": True}, "k4", "a circuit for each sample"),
        ({"propagator_layers": 0}, "k4", "no propagators"),
        ({}, "k", "not a number"),
        ({}, "k4b0001", "keeps none of 64 modules"),
        ({}, "k4r8", "not a number"),
    ],
)
def test_what_cannot_be_kept_is_refused(changes: dict[str, Any], text: str, words: str) -> None:
    with pytest.raises(SaccadeError, match=words):
        NACConfig(**changes).budget(text)


@pytest.mark.parametrize("family", ("sparo", "sot", "slot-attention", "vqa", "captioner"))
def test_families_without_links_refuse_them(family: str) -> None:
    with pytest.raises(SaccadeError, match="'k4'"):
        config_class(family)().budget("k4")


def test_a_configuration_and_a_model_refuse_links_too() -> None:
    for changes in ({"links": 64}, {"links": 4, "conditional": True}):
        with pytest.raises(SaccadeError, match="NAC configuration, links"):
            NACConfig(**changes)
    with pytest.raises(SaccadeError, match="sparse: keeps 16 links"):
        nac().sparse(16)


def test_a_sparse_variant_passes_the_gate(tmp_path: Path) -> None:
    checkpoint = tiny_nac(tmp_path / "nac.safetensors", images=40)
    options = ExportOptions(tmp_path / "out", budget=("k4", "k3b0500"), outputs=("link",))
    manifests = export(checkpoint.path, options, FEW_SAMPLES).manifests
    counts = [(m.variant.name, m.variant.kept, m.variant.total) for m in manifests]
    assert counts == [("nac-k4-fp32", 4, 16), ("nac-k3b0500-fp32", 3, 8)]
    assert all(manifest.parity.passed for manifest in manifests)
