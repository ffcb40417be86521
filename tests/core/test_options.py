# SPDX-License-Identifier: Apache-2.0
"""Options are checked by their annotations, on the command line and in Python alike."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest

from saccade.core.errors import SaccadeError
from saccade.core.options import Options, range_of
from saccade.core.schema import Count, Length, Pattern, Range


@dataclass(frozen=True)
class Own(Options):
    most_rows: Count | None = None
    out: Path | None = None
    clients: Annotated[tuple[Annotated[int, Range(1, 9)], ...], Length(1)] = (1,)
    budget: float | str | None = None
    kind: Literal["a", "b"] = "a"
    word: Annotated[str, Pattern("[a-z]+", "a word such as gpu")] = "gpu"
    move: tuple[float, float] = (0.0, 0.0)
    shown: bool = False


REFUSED = (
    ({"most_rows": 0}, "--most-rows: found 0, expected a whole number of at least 1."),
    ({"out": 3}, "--out: found 3, expected a path."),
    ({"clients": (1, 10)}, "--clients: found 10, expected a whole number of at least 1 and"),
    ({"clients": ()}, "--clients: found (), expected at least 1 value."),
    ({"budget": [1]}, "--budget: found [1], expected a finite number or a string or nothing."),
    ({"kind": "c"}, "--kind: found 'c', expected one of a, b."),
    ({"word": "my gpu"}, "--word: found 'my gpu', expected a word such as gpu."),
    ({"move": (1, 2, 3)}, "--move: found (1, 2, 3), expected a list of 2 values, each a finite nu"),
    ({"shown": 1}, "--shown: found 1, expected true or false."),
)


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_a_value_that_the_annotation_does_not_allow_names_its_flag(given, words):
    with pytest.raises(SaccadeError) as refused:
        Own(**given)
    assert str(refused.value).startswith(words) and "Write it again" not in str(refused.value)


def test_numbers_of_numpy_are_numbers():
    own = Own(most_rows=np.int64(3), clients=[np.int32(2)], budget=np.float32(0.5), shown=np.True_)
    assert own == Own(3, clients=(2,), budget=0.5, shown=True) and type(own.most_rows) is int


def test_values_are_as_their_annotations():
    own = Own(most_rows=2, out="a/b", clients=[2, 3], budget=1, move=[1, 2])
    assert own == Own(2, Path("a/b"), (2, 3), 1.0, move=(1.0, 2.0))
    assert type(own.budget) is float and Own(budget="2/3").budget == "2/3"
    assert [range_of(Own, name) for name in ("most_rows", "shown")] == [Range(1), Range(0, 1)]
