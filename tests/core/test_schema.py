# SPDX-License-Identifier: Apache-2.0
"""Values against annotations: what is taken, what is refused, and in which words."""

from typing import Any, Literal

import numpy as np
import pytest

from saccade.core.errors import SaccadeError
from saccade.core.schema import Count, Natural, NonNegative, Positive, Probability, Share, typed

TAKEN: tuple[tuple[Any, Any], ...] = (
    (Count, 1),
    (Natural, 0),
    (Positive, 1e-300),
    (NonNegative, 0.0),
    (Share, 0.0),
    (Share, 1.0),
    (Probability, 0.5),
    (float, np.float64(0.5)),
    (bool, False),
    (int | None, None),
    (Literal["a", "b"], "b"),
    (tuple[Count, ...], (1, 2)),
)
REFUSED: tuple[tuple[Any, Any, str], ...] = (
    (Count, 0, "found 0, expected a whole number of at least 1"),
    (Natural, -1, "a whole number of at least 0"),
    (Positive, 0.0, "expected above 0"),
    (NonNegative, -1e-300, "expected at least 0"),
    (Share, 1.5, "expected at least 0 and at most 1"),
    (Share, -0.5, "expected at least 0 and at most 1"),
    (Probability, 0.0, "expected above 0 and below 1"),
    (Probability, 1.0, "expected above 0 and below 1"),
    (float, float("nan"), "a finite number"),
    (float, 10**400, "a finite number"),
    (int, True, "found True, expected a whole number"),
    (int, 1.0, "a whole number"),
    (int, 2**63, "a whole number of at most"),
    (bool, 1, "true or false"),
    (str, 1, "a string"),
    (Literal["a", "b"], "c", "found 'c', expected one of a, b"),
    (Literal[1, 2], True, "one of 1, 2"),
    (tuple[int, int], [1], "a list of 2 values, each a whole number"),
    (tuple[Count, ...], [1, 0], r"\[1\]: found 0"),
)


@pytest.mark.parametrize(("kind", "value"), TAKEN)
def test_a_value_of_its_kind_is_taken_as_it_is(kind, value):
    assert typed(kind, value, "") == value


def test_nothing_is_converted_but_lists_and_whole_numbers():
    assert type(typed(float, 2, "")) is float
    assert typed(tuple[int, ...], [1, 2], "") == (1, 2)


@pytest.mark.parametrize(("kind", "value", "words"), REFUSED)
def test_another_value_is_refused_in_words(kind, value, words):
    with pytest.raises(SaccadeError, match=f"^width: .*{words}"):
        typed(kind, value, "width: ")
