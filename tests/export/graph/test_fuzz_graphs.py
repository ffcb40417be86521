# SPDX-License-Identifier: Apache-2.0
"""Changed ONNX files: each is read, or refused with a message; test_fuzz_readers.py has manifests.

The long form is tests/fuzz.py --graphs. Seeds that ended otherwise there are kept in `FAILED`.
"""

from fuzz_seeds import with_seeds
from graph_fuzz import outcome

FAILED = (180,)


def test_it_is_read_or_refused() -> None:
    ended = {outcome(seed) for seed in FAILED}
    with_seeds(200, lambda seed: ended.add(outcome(seed)))
    assert ended == {"read", "refused"}
