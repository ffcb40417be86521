# SPDX-License-Identifier: Apache-2.0
"""The confidence by which a chain stops: by its definition, row by row."""

import numpy as np
import pytest

from saccade.model_repository.router.confidence import MEASURES, confidence

WARM = 1.7
DRAWN = np.random.default_rng(0).normal(0, 3, (40, 7)).astype(np.float32)


def defined(measure, logits):
    """Return a row's confidence by its definition, from its sorted probabilities."""
    powers = np.exp(logits.astype(np.float64) / WARM)
    chances = np.sort(powers / powers.sum())
    entropy = 1 + (chances * np.log(chances)).sum() / np.log(len(chances))
    return {"top1": chances[-1], "margin": chances[-1] - chances[-2], "entropy": entropy}[measure]


@pytest.mark.parametrize("measure", MEASURES)
def test_it_is_what_is_defined(measure):
    expected = [defined(measure, row) for row in DRAWN]
    np.testing.assert_allclose(confidence(measure, DRAWN, WARM), expected, rtol=1e-12)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_row_is_as_confident_alone_as_among_others(measure):
    """A threshold is the confidence of a calibration sample: one different bit could decide."""
    alone = [confidence(measure, row[None], WARM)[0] for row in DRAWN]
    np.testing.assert_array_equal(confidence(measure, DRAWN, WARM), alone)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("measure", MEASURES)
def test_a_row_that_is_not_finite_has_none_and_changes_no_other(measure, value):
    broken = DRAWN.copy()
    broken[3, 2] = value
    expected = confidence(measure, DRAWN, WARM)
    expected[3] = 0
    np.testing.assert_array_equal(confidence(measure, broken, WARM), expected)


def test_edges():
    tie, certain = np.array([[1.0, 4.0, 4.0]]), np.array([[900.0, 0.0, -900.0]])
    assert confidence("margin", tie, 1.0) == 0
    assert confidence("entropy", np.zeros((1, 3)), 1.0) == pytest.approx(0, abs=1e-15)
    for measure in MEASURES:
        assert confidence(measure, certain, 1.0) == 1
        assert confidence(measure, np.zeros((1, 1)), 1.0) == 1
        assert confidence(measure, np.zeros((0, 3)), 1.0).shape == (0,)
