# SPDX-License-Identifier: Apache-2.0
"""`saccade models`: every family has named sizes, counted without making their weights."""

import json
import re

import numpy as np
import pytest
import torch

from saccade.core.errors import SaccadeError
from saccade.models.catalogue import known_sizes, list_models, presets, row
from saccade.models.families import FAMILIES, build

# Parameters of the authors' own models; of DeiT and Swin as timm counts them, where a distilled
# DeiT has the biases of two classifiers instead of one.
PUBLISHED = {
    "vit-b-32-sparo": 145_649_281,
    "vit-b-16-sparo": 143_992_705,
    "vit-b-32": 151_277_313,
    "sot-tiny": 8_030_830,
    "sot-small": 27_086_504,
    "sot-base": 76_878_982,
    "vit-b16": 86_567_656,
    "vit-b32": 88_224_232,
    "vit-s16": 22_050_664,
    "deit-tiny": 5_717_416,
    "deit-tiny-distilled": 5_910_800 - 1000,
    "swin-tiny": 28_288_354,
}


def test_every_family_has_rows_that_name_their_components_and_source() -> None:
    rows = list_models()
    assert {row.family for row in rows} == set(FAMILIES)
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)
    for each in rows:
        assert each.parameters > 0
        assert each.settings
        assert re.search(r"(19|20)\d\d", each.source)
        assert all(each.inputs.values())
        assert all(each.outputs.values())
        # Written by benchmarks/models_cost.py: run it for a size that is new or was changed.
        assert each == row(each.family, each.name, each.multiply_adds)
        assert set(each.multiply_adds) == set(each.outputs), each.name
        assert all(count > 0 for count in each.multiply_adds.values()), each.name
    assert {row.name: row.parameters for row in rows if row.name in PUBLISHED} == PUBLISHED
    json.dumps([row.to_dict() for row in rows])


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_what_a_real_model_has(family: str) -> None:
    smallest = min(list_models(family), key=lambda each: each.parameters)
    assert smallest.parameters < 100_000
    model = build(family, presets(family)[smallest.name].to_dict())
    assert sum(parameter.numel() for parameter in model.parameters()) == smallest.parameters


def smallest_of(family: str) -> str:
    known = known_sizes()[family]
    return min(known, key=lambda name: known[name]["parameters"])


def test_multiply_adds_are_those_of_the_graph() -> None:
    """Of the family that is traced the fastest: what counts the others is the same code."""
    from saccade.exporter.graph.cost import cost_of_size

    counted = cost_of_size("sot", smallest_of("sot"))
    known = known_sizes()["sot"][smallest_of("sot")]
    assert counted == {name: known[name] for name in counted}


@pytest.mark.parametrize("family", ["sparo", "captioner"])
def test_torch_counts_the_same_multiply_adds_where_no_op_is_ours(family: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from saccade.exporter.graph.samples import random_inputs

    name = smallest_of(family)
    model = build(family, presets(family)[name].to_dict()).eval()
    counts = {}
    for component in model.at(model.budgets()[0]).fold().components():
        inputs = random_inputs(component, np.random.default_rng(0), 3)
        tensors = {key: torch.from_numpy(value) for key, value in inputs.items()}
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            component.run(**tensors)
        counts[component.role] = counter.get_total_flops() / (2 * 3)
    assert counts == known_sizes()[family][name]["multiply_adds"]


def test_every_size_is_known_without_its_model_and_no_other_one() -> None:
    assert {family: set(sizes) for family, sizes in known_sizes().items()} == {
        family: set(presets(family)) for family in FAMILIES
    }


def test_unknown_names_are_refused_with_the_known() -> None:
    with pytest.raises(SaccadeError, match=r"'gpt' is unknown.*sparo"):
        list_models("gpt")
    with pytest.raises(SaccadeError, match=r"sot has no size 'huge'.*sot-tiny"):
        row("sot", "huge")
