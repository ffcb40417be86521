# SPDX-License-Identifier: Apache-2.0
"""Changed ONNX files and manifests: each is read, or refused with a message.

The long form is tests/fuzz.py --graphs. Seeds that ended otherwise there are kept in `FAILED`.
"""

from pathlib import Path

import graph_fuzz
import pytest
from fuzz_seeds import with_seeds

FAILED: dict[str, tuple[int, ...]] = {"graph": (180,), "manifest": ()}


@pytest.mark.parametrize("kind", FAILED)
def test_it_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    def ending(seed: int) -> str:
        return graph_fuzz.graph(seed) if kind == "graph" else graph_fuzz.manifest(seed, tmp_path)

    ended = {ending(seed) for seed in FAILED[kind]}

    with_seeds(200, lambda seed: ended.add(ending(seed)))
    assert ended == {"read", "refused"}
