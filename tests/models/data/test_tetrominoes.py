# SPDX-License-Identifier: Apache-2.0
"""Tetrominoes, and the index that says how well their segments were found."""

import numpy as np
import pytest

from saccade.core.errors import SaccadeError, ShapeError
from saccade.models.data.tetrominoes import COLOURS, tetromino_batch, tetrominoes
from saccade.models.scores.ari import adjusted_rand_index


@pytest.mark.parametrize(("side_px", "cell_px"), [(20, 3), (24, 3), (35, 5)])
def test_a_scene_has_three_whole_pieces(side_px, cell_px):
    drawn = tetrominoes("test", 70, side_px=side_px)
    assert drawn.images.shape == (70, side_px, side_px, 3) and drawn.images.dtype == np.uint8
    assert drawn.masks.shape == (70, side_px, side_px) and drawn.masks.dtype == np.uint8
    for image, mask in zip(drawn.images, drawn.masks, strict=True):
        assert list(np.bincount(mask.ravel())[1:]) == [4 * cell_px**2] * 3
        assert not image[mask == 0].any()
        for piece in (1, 2, 3):
            assert tuple(np.unique(image[mask == piece], axis=0)[0]) in COLOURS
            assert len(np.unique(image[mask == piece], axis=0)) == 1


def test_every_form_and_colour_comes():
    drawn = tetromino_batch(np.random.default_rng(0), 200, side_px=14)
    forms, colours = set(), set()
    for image, mask in zip(drawn.images, drawn.masks, strict=True):
        for piece in (1, 2, 3):
            rows, columns = np.nonzero(mask == piece)
            cells = set(zip((rows - rows.min()) // 2, (columns - columns.min()) // 2, strict=True))
            forms.add(frozenset(cells))
            colours.add(tuple(image[rows[0], columns[0]]))
    assert len(forms) == 19 and all(len(cells) == 4 for cells in forms)
    assert len(colours) == 6


def test_scenes_are_fixed_and_splits_differ():
    first, longer = tetrominoes("train", 40, side_px=20), tetrominoes("train", 100, side_px=20)
    assert np.array_equal(first.images, longer.images[:40])
    assert len(np.unique(longer.masks.reshape(100, -1), axis=0)) == 100
    other = tetrominoes("validation", 40, side_px=20)
    assert not (first.masks == other.masks).all(axis=(1, 2)).any()
    assert len(tetrominoes("test", side_px=14).images) == 320
    again = tetrominoes("train", 40, seed=1, side_px=20)
    assert not np.array_equal(first.masks, again.masks)


def test_left_means_the_middle_of_each_piece():
    drawn = tetrominoes("train", 64, side_px=20, positions="left")
    for mask in drawn.masks:
        for piece in (1, 2, 3):
            columns = np.nonzero((mask == piece).any(0))[0]
            assert (columns.min() + columns.max()) / 2 < (20 - 1) / 2
    anywhere = tetrominoes("train", 64, side_px=20).masks
    assert (anywhere[:, :, 10:] > 0).sum() > 2 * (drawn.masks[:, :, 10:] > 0).sum()


def test_wrong_words_are_named():
    with pytest.raises(SaccadeError, match="split is 'dev', expected one of train"):
        tetrominoes("dev")
    with pytest.raises(SaccadeError, match="positions is 'right', expected one of anywhere, left"):
        tetrominoes("test", 1, positions="right")
    with pytest.raises(SaccadeError, match="side_px is 10, expected at least 14"):
        tetrominoes("test", 1, side_px=10)
    with pytest.raises(SaccadeError, match="count is 0"):
        tetrominoes("test", 0)


def test_index_ignores_names_and_the_background():
    rng = np.random.default_rng(0)
    true = rng.integers(0, 4, (5, 8, 8))
    renamed = np.array([7, 2, 9, 0])[true]
    assert np.array_equal(adjusted_rand_index(true, renamed), np.ones(5))
    merged = np.where(true == 0, renamed[0, 0, 0], renamed)  # the background joins an object
    assert np.array_equal(adjusted_rand_index(true, merged, foreground=True), np.ones(5))
    assert adjusted_rand_index(true, rng.permuted(renamed, axis=2)).max() < 0.3
    assert np.array_equal(adjusted_rand_index(true * 0, renamed, foreground=True), np.ones(5))
    with pytest.raises(ShapeError, match="Resize the masks to the size"):
        adjusted_rand_index(true, renamed[:, :4])


def test_index_agrees_with_scikit_learn():
    from sklearn import metrics

    rng = np.random.default_rng(1)
    true, actual = rng.integers(0, 3, (6, 50)), rng.integers(0, 4, (6, 50))
    actual[:3] = np.where(rng.random((3, 50)) < 0.7, true[:3], actual[:3])
    expected = [metrics.adjusted_rand_score(*pair) for pair in zip(true, actual, strict=True)]
    assert np.allclose(adjusted_rand_index(true, actual), expected, atol=1e-12)
