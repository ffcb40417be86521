# SPDX-License-Identifier: Apache-2.0
"""The captioner against its paper, written again with NumPy: Martins et al. 2021, section 3.1.

No code of the authors' captioner is known to us, so no tensors of theirs are held against ours.
What the paper prints is worked out here cell by cell, and its TVMAX by another method than the
op's.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import optimize

from saccade.models.captioner.config import PRESETS
from saccade.models.captioner.model import Captioner

TINY = PRESETS["captioner-tiny"]
WORDS = (1, 4, 6, 5)


def captioner_of(**changes):
    """A captioner in float64 whose attention has something to choose between."""
    model = Captioner(replace(TINY, **changes)).double().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 1:
                value += 0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
            if "query" in name or "embedding" in name:
                value *= 3  # each word moves what is looked at
    return model


def numbers(model):
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def affine(w, name, x):
    return w[f"{name}.weight"] @ x + w[f"{name}.bias"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(z):
    return np.exp(z) / np.exp(z).sum()


def simplex_projection(z):
    """Eq. 2: the threshold at which what is left above it sums to 1."""
    most = z.max()
    threshold = optimize.brentq(
        lambda t: np.maximum(z - t, 0).sum() - 1, most - 1, most, xtol=1e-15
    )
    return np.maximum(z - threshold, 0)


def total_variation_prox(z, height, width, lam):
    """Eq. 4 with the penalty of eq. 5, through its dual: least squares inside a box."""
    cell = np.arange(height * width).reshape(height, width)
    edges = [*zip(cell[1:].ravel(), cell[:-1].ravel(), strict=True)]
    edges += zip(cell[:, 1:].ravel(), cell[:, :-1].ravel(), strict=True)
    difference = np.zeros((len(edges), len(z)))
    for row, (one, other) in enumerate(edges):
        difference[row, one], difference[row, other] = 1, -1
    dual = optimize.lsq_linear(difference.T, z, (-lam, lam), method="bvls", tol=1e-14).x
    return z - difference.T @ dual


def attention_map(kind, z, config):
    if kind == "softmax":
        return softmax(z)
    if kind == "tvmax":  # proposition 1
        z = total_variation_prox(z, config.grid_height, config.grid_width, config.lam)
    return simplex_projection(z)


def scores(w, kind, cells, h):
    """z_i = w' tanh(affine([v_i; h]))."""
    matrix = np.concatenate([w[f"{kind}_key.weight"], w[f"{kind}_query.weight"]], 1)
    row = w[f"{kind}_score.weight"][0]
    hidden = [matrix @ np.concatenate([v, h]) + w[f"{kind}_key.bias"] for v in cells]
    return np.array([row @ np.tanh(each) for each in hidden])


def lstm(w, x, h, c):
    """Hochreiter and Schmidhuber's cell with a forget gate, gates in the library's order."""
    both = w["lstm.weight_ih"] @ x + w["lstm.bias_ih"] + w["lstm.weight_hh"] @ h + w["lstm.bias_hh"]
    admit, forget, cell, show = np.split(both, 4)
    c = sigmoid(forget) * c + sigmoid(admit) * np.tanh(cell)
    return sigmoid(show) * np.tanh(c), c


def captioned(w, config, cells, words):
    """Probabilities of each next word, and both attentions, of one image."""
    middle = np.mean(cells, 0)
    h, c = (np.tanh(affine(w, name, middle)) for name in ("first_h", "first_c"))
    found = []
    for word in words:
        alpha = softmax(scores(w, "input", cells, h))
        s = sum(a * v for a, v in zip(alpha, cells, strict=True))
        h, c = lstm(w, np.concatenate([w["embedding.weight"][word], s]), h, c)
        out = attention_map(config.attention, scores(w, "output", cells, h), config)
        seen = sum(a * v for a, v in zip(out, cells, strict=True))
        r = np.tanh(affine(w, "image_layer", seen))
        found.append((softmax(affine(w, "head", np.concatenate([r, h]))), out, alpha))
    return [np.array(each) for each in zip(*found, strict=True)]


@pytest.mark.parametrize("attention", ["softmax", "sparsemax", "tvmax"])
def test_every_word_is_what_the_paper_says(attention):
    model = captioner_of(attention=attention, encoder="features", position=False)
    config, w = model.config, numbers(model)
    grids = np.random.default_rng(0).standard_normal((2, 4, 4, config.feature_dim))
    with torch.no_grad():
        logits, maps = model(torch.from_numpy(grids), torch.tensor([WORDS] * 2))
        features, h, c = model.encode(torch.from_numpy(grids))
        first = model.step(features, h, c, torch.tensor([WORDS[0]] * 2))
    for row, grid in enumerate(grids):
        cells = [np.maximum(affine(w, "feed_forward", x), 0) for x in grid.reshape(16, -1)]
        words, out, alpha = captioned(w, config, cells, WORDS)
        np.testing.assert_allclose(maps[row].flatten(1), out, atol=3e-6)
        np.testing.assert_allclose(logits[row].softmax(-1), words, atol=3e-5)
        np.testing.assert_allclose(first.input_attention[row].ravel(), alpha[0], atol=1e-10)
        assert ((out == 0).any() and (out > 0).sum() > 4) == (attention != "softmax")
    if attention == "tvmax":
        without = captioned(w, replace(config, attention="sparsemax"), cells, WORDS)[1]
        assert np.abs(out - without).max() > 1e-3, "the penalty should be seen"


def test_cells_come_from_convolutions_with_norm_and_relu_and_a_place():
    model = captioner_of()
    generator = torch.Generator().manual_seed(2)
    for layer in model.convolutions:
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean += 0.1 * torch.randn(layer.num_features, generator=generator)
            layer.running_var += torch.rand(layer.num_features, generator=generator)
    config, w = model.config, numbers(model)
    image = np.random.default_rng(0).integers(0, 256, (1, 16, 16, 3), dtype=np.uint8)
    x = (image[0] / 255 - np.array(config.mean)) / np.array(config.std)
    for layer in (0, 3):  # convolution, norm, ReLU
        kernel = w[f"convolutions.{layer}.weight"]
        padded = np.pad(x, ((1, 1), (1, 1), (0, 0)))
        rows = range(0, len(x), 2)
        parts = [[padded[i : i + 3, j : j + 3] for j in rows] for i in rows]
        x = np.einsum("ijyxc,ocyx->ijo", np.array(parts), kernel)
        mean, var, scale, shift = (
            w[f"convolutions.{layer + 1}.{name}"]
            for name in ("running_mean", "running_var", "weight", "bias")
        )
        x = np.maximum((x - mean) / np.sqrt(var + 1e-5) * scale + shift, 0)
    visual = np.maximum(x @ w["feed_forward.weight"].T + w["feed_forward.bias"], 0) + w["position"]
    with torch.no_grad():
        features, h, c = model.encode(torch.from_numpy(image))
    np.testing.assert_allclose(features[0, ..., : config.dim], visual, atol=1e-10)
    middle = visual.mean((0, 1))
    np.testing.assert_allclose(h[0], np.tanh(affine(w, "first_h", middle)), atol=1e-10)
    np.testing.assert_allclose(c[0], np.tanh(affine(w, "first_c", middle)), atol=1e-10)
