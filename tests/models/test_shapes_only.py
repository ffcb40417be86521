# SPDX-License-Identifier: Apache-2.0
"""Outlines of models: those of the meta device, without torch's compiler."""

import subprocess
import sys

import pytest
import torch

from saccade.models.entry import imported
from saccade.models.families import entries, family_class
from saccade.models.shapes_only import ShapesOnly, Undrawn

OUTLINES = """
import sys
from saccade.models.entry import imported
from saccade.models.families import entries, outline
for family, entry in entries():
    for name, config in imported(entry.presets).items():
        outline(family, config.to_dict())
        slow = [module for module in ("torch._dynamo", "sympy") if module in sys.modules]
        assert not slow, (name, slow)
"""


def test_outlines_of_all_sizes_do_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", OUTLINES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


def described(model: torch.nn.Module) -> dict[str, tuple[object, ...]]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: (x.shape, x.dtype, x.device, x.requires_grad) for name, x in tensors}


@pytest.mark.parametrize("family", [name for name, _ in entries()])
def test_they_are_those_of_the_meta_device(family: str) -> None:
    kind = family_class(family)
    for name, config in imported(dict(entries())[family].presets).items():
        with ShapesOnly():
            ours = kind(config, fresh=False)
        with torch.device("meta"):
            theirs = kind(config, fresh=False)
        assert described(ours) == described(theirs), name


def test_numbers_that_exist_are_computed() -> None:
    real = torch.ones(2)
    with ShapesOnly():
        assert (real * 3).tolist() == [3, 3] and torch.stack([real, real]).tolist() == [[1, 1]] * 2
        torch.nn.init.uniform_(tensor=real, a=5, b=6)
        assert torch.arange(1, 8, 3).shape == (3,) and torch.arange(3).dtype == torch.int64
        assert torch.stack([torch.rand(2, 3)] * 4, -1).shape == (2, 3, 4)
    assert (real >= 5).all()


def test_undrawn_numbers_are_not_touched() -> None:
    real = torch.full((2, 2), 7.0)
    with Undrawn():
        torch.nn.init.kaiming_uniform_(real)
        torch.nn.init.normal_(real.uniform_())
        assert torch.randn(2, 3, dtype=torch.float64).dtype == torch.float64
        assert torch.rand(2, 3).shape == (2, 3)
        assert (torch.ones(2) * 3).tolist() == [3, 3]
    assert (real == 7).all()


@pytest.mark.timeout(30)
def test_a_truncated_draw_ends_whatever_is_in_memory() -> None:
    real = torch.full((2, 2), 7.0)
    with Undrawn():
        torch.nn.init.trunc_normal_(real, std=0.1, a=-0.2, b=0.2)
    assert (real.abs() <= 0.2).all()
