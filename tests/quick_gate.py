# SPDX-License-Identifier: Apache-2.0
"""A gate with few samples, for tests of other things."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from saccade.exporter.gate import reference
from saccade.exporter.graph.samples import GateSizes

FEW_SAMPLES = GateSizes(real_inputs=16, random_inputs=8, batches=(1, 4))


@contextmanager
def quick_gate() -> Iterator[None]:
    """Use it for exports and verifications by the command line, whose levels take more."""
    with mock.patch.object(reference, "gate_sizes", lambda level, multiply_adds: FEW_SAMPLES):
        yield
