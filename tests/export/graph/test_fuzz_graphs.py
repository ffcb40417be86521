# SPDX-License-Identifier: Apache-2.0
"""Changed ONNX files and manifests: each is read, or refused with a message.

The long form is benchmarks/fuzz_graphs.py. Seeds that ended otherwise there are kept in `FAILED`.
"""

from pathlib import Path

import graph_fuzz
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FAILED: dict[str, tuple[int, ...]] = {"graph": (180,), "manifest": ()}


@pytest.mark.parametrize("kind", FAILED)
def test_it_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    def ending(seed: int) -> str:
        return graph_fuzz.graph(seed) if kind == "graph" else graph_fuzz.manifest(seed, tmp_path)

    ended = {ending(seed) for seed in FAILED[kind]}

    @settings(
        max_examples=200,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 2**32))
    def run(seed: int) -> None:
        ended.add(ending(seed))

    run()
    assert ended == {"read", "refused"}
