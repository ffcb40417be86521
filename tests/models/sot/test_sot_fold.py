# SPDX-License-Identifier: Apache-2.0
"""The folded form is the same function; the exporter's tests make an ONNX file of it."""

import numpy as np
import pytest
import torch
from fixed_fold import folded_in_order

from saccade.models.sot.config import AUTHORS, SoTConfig
from saccade.models.sot.model import SoT

SMALL = {
    "height_px": 32,
    "width_px": 32,
    "channels": 3,
    "patch_px": 8,
    "classes": 5,
    "mean": (0.4, 0.5, 0.6),
    "std": (0.2, 0.3, 0.25),
    "pool_heads": 2,
    "m": 3,
    "n": 4,
    "dim": 16,
    "heads": 2,
    "layers": 2,
    "mlp_dim": 24,
    "gcp_dim": 5,
}
SWIN = {
    "trunk": "swin",
    "patch_px": 2,
    "window": 4,
    "fusion": "visual",
    "stage_layers": (2, 2),
    "stage_heads": (2, 4),
}
FORMS = {
    "naive": {},
    "ridge": {"svpn_ridge": 0.01},
    "late": {"fusion": "late", "normalization": "epn"},
    "projected": {"class_projection": 9, "class_activation": "tanh"},
    "aggr-all": {"fusion": "aggr-all", "pooling": "gcp"},
    "distilled": {"distillation": True, "qkv_bias": True},
    "densenet": {"token_embedding": "densenet", "position": "sinusoid"} | AUTHORS,
    "densenet with norms": {"token_embedding": "densenet", "dense_norm": True},
    "resnet": {"token_embedding": "resnet", "patch_px": 16},
    "inception": {"token_embedding": "inception", "normalization": "layer-norm"},
    "non-local": {"token_embedding": "non-local", "normalization": "scale-learned"},
    "swin": SWIN,
    "swin average": SWIN | {"pooling": "gap", "qkv_bias": True, "stage_layers": (1, 2)},
    "text": {"input": "tokens", "max_tokens": 6},
}


def trained(config):
    """A model whose weights and running statistics are none of the initial ones."""
    model = SoT(config)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.normal_(module.running_mean)
                torch.nn.init.uniform_(module.running_var, 0.5, 2)
                torch.nn.init.normal_(module.weight)
                torch.nn.init.normal_(module.bias)
            elif isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=0.3)
                if module.bias is not None:
                    torch.nn.init.normal_(module.bias)
    return model.eval()


def inputs(config):
    rng = np.random.default_rng(0)
    if config.input == "tokens":
        return torch.from_numpy(rng.standard_normal((2, 6, 16))), torch.tensor([3, 6])
    return (torch.from_numpy(rng.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)),)


@pytest.mark.parametrize("name", FORMS)
def test_folded_is_the_same_function(name):
    config = SoTConfig(**SMALL | FORMS[name])
    model = trained(config).double()
    for budget in model.budgets():
        chosen = model.at(budget)
        with torch.no_grad():
            pair = chosen, folded_in_order(chosen)
            expected, actual = (m.outputs(*inputs(config)) for m in pair)
        assert list(actual) == list(expected)
        for output, each in expected.items():
            scale = each.abs().max()
            assert (actual[output] - each).abs().max() <= 1e-10 * scale, (budget.label, output)


def test_folded_form_has_no_batch_norm_left_where_a_convolution_follows_or_precedes():
    for name in ("densenet", "resnet", "inception", "non-local"):
        folded = trained(SoTConfig(**SMALL | FORMS[name])).fold()
        assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in folded.modules())


def test_class_only_form_computes_one_token_in_the_last_block():
    model = trained(SoTConfig(**SMALL))
    folded = model.at(model.budget("class")).fold()
    seen = []
    folded.trunk.blocks[-1].widen.register_forward_hook(lambda m, x, y: seen.append(x[0].shape))
    folded.outputs(*inputs(folded.config))
    assert seen == [(2, 1, 16)]
