# SPDX-License-Identifier: Apache-2.0
"""Road signs: independent samples, pictograms that fit their names, near and far in proportion."""

import io
from itertools import combinations

import numpy as np
import pytest
from PIL import Image, ImageDraw

from saccade.core.errors import SaccadeError
from saccade.models.data import signs as module
from saccade.models.data.datasets import load_data
from saccade.models.data.signs import (
    CLASS_NAMES,
    FAR,
    NEAR,
    PICTOGRAMS,
    SIDE_PX,
    resized,
    sign_batch,
    signs,
)
from saccade.models.image_decoding import decode
from saccade.models.preprocessing import Preprocessing

SMALL = Preprocessing(24, 24, 1, (0.0,), (1.0,))


@pytest.fixture(scope="module")
def drawn():
    return signs("validation", 320)


def test_signs_are_the_same_every_time_and_differ_by_split(drawn):
    images, labels = drawn
    assert images.shape == (320, SIDE_PX, SIDE_PX, 1) and images.dtype == np.uint8
    assert labels.dtype == np.int64 and set(labels) == set(range(len(CLASS_NAMES)))
    again, same = signs("validation", 3)
    np.testing.assert_array_equal(again, images[:3])
    np.testing.assert_array_equal(same, labels[:3])
    others = [signs(split, 40)[0] for split in ("train", "test")]
    seen = {image.tobytes() for part in (images, *others) for image in part}
    assert len(seen) == 400


def test_each_sample_has_a_seed_of_its_own(monkeypatch):
    """No draw reads what another one left in a generator, so the test samples are independent."""
    seeds = []
    default_rng = np.random.default_rng
    monkeypatch.setattr(
        module.np.random, "default_rng", lambda seed: seeds.append(seed) or default_rng(seed)
    )
    signs("test", 5)
    assert len(set(seeds)) == 5
    batch, _ = sign_batch(default_rng(0), 5)
    assert len({image.tobytes() for image in batch}) == 5


def test_near_and_far_signs_are_inside_and_even_by_octave(monkeypatch):
    boxes: list[np.ndarray] = []
    ellipse = ImageDraw.ImageDraw.ellipse

    def recorded(pen, box, fill):
        boxes.append(np.array(box))
        ellipse(pen, box, fill)

    monkeypatch.setattr(ImageDraw.ImageDraw, "ellipse", recorded)
    rims = []
    for row in range(600):
        module.sign(np.random.default_rng(row))
        rims.append(boxes[-2])
    places = np.array(rims) / (SIDE_PX * 4)
    assert places.min() >= 0 and places.max() <= 1
    width = places[:, 2] - places[:, 0]
    np.testing.assert_allclose(width, places[:, 3] - places[:, 1])
    assert FAR <= width.min() < 1.1 * FAR and 0.9 * NEAR < width.max() <= NEAR
    share = np.log(width / FAR) / np.log(NEAR / FAR)
    assert abs(np.quantile(share, (0.25, 0.5, 0.75)) - (0.25, 0.5, 0.75)).max() < 0.07


def test_pictograms_differ_and_are_drawn_dark_on_light(monkeypatch):
    grids = [
        np.array([[cell == "x" for cell in row] for row in rows.split("/")])
        for rows in PICTOGRAMS.values()
    ]
    assert all(grid.shape == (5, 5) for grid in grids)
    assert min((a != b).sum() for a, b in combinations(grids, 2)) >= 4
    monkeypatch.setattr(module, "NEAR", 1.0)
    monkeypatch.setattr(module, "FAR", 1.0)  # every sign fills the image, in cells of 9 px
    images, labels = sign_batch(np.random.default_rng(0), 400)
    cells = images[:, 18:63, 18:63, 0].reshape(400, 5, 9, 5, 9).mean((2, 4))
    for label, name in enumerate(CLASS_NAMES):
        mean = cells[labels == label].mean(0).ravel()
        fit = [np.corrcoef(mean, grid.ravel())[0, 1] for grid in grids]
        assert np.argmin(fit) == label and fit[label] < -0.9, name


def test_a_model_gets_the_pixels_that_the_router_would_send_it(drawn):
    images, _ = drawn
    for wanted in (SMALL.wanted(), Preprocessing(96, 96, 3, (0.0,) * 3, (1.0,) * 3).wanted()):
        file = io.BytesIO()
        Image.fromarray(images[0, ..., 0]).save(file, "PNG")
        np.testing.assert_array_equal(
            resized(images[:1], wanted)[0], decode(file.getvalue(), wanted)
        )


def test_data_of_a_split_in_a_models_size():
    data = load_data("signs", "val", preprocessing=SMALL)
    assert data.images.shape == (2_000, 24, 24, 1) and data.class_names == CLASS_NAMES
    images, labels = signs("validation", 2)
    np.testing.assert_array_equal(data.images[:2], resized(images, SMALL.wanted()))
    np.testing.assert_array_equal(data.labels[:2], labels)
    new = load_data("signs", "val", side_px=24)
    assert new.sha256 == data.sha256


@pytest.mark.parametrize(("split", "count"), [("holdout", 1), ("test", 0)])
def test_what_cannot_be_drawn_is_refused(split, count):
    with pytest.raises(SaccadeError, match=r"split|signs: count"):
        signs(split, count)
