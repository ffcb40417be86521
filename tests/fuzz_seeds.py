# SPDX-License-Identifier: Apache-2.0
"""Seeds of changed files, the same in every run."""

from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def with_seeds(examples: int, run: Callable[[int], object]) -> None:
    """Call a function with that many seeds; hypothesis reports the smallest that fails."""

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32))
    def one(seed: int) -> None:
        run(seed)

    one()
