# SPDX-License-Identifier: Apache-2.0
"""Entries of a frontier, as `bench` writes them, with the figures that a test gives."""

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.exporter.artefact.frontier import FrontierEntry, entry_of

ROUNDS = "inferences_per_second_rounds"


def point(
    rate: float = 100.0, p95_ms: float = 2.0, rounds: Sequence[float] = (), **more: Any
) -> dict[str, Any]:
    """Return the figures of one load, in rounds if there are any."""
    quantiles = {"p50_ms": p95_ms / 2, "p95_ms": p95_ms, "p99_ms": 2 * p95_ms}
    in_rounds = {ROUNDS: list(rounds)} if rounds else {}
    return {"inferences_per_second": rate, **quantiles, **in_rounds, **more}


def frontier_entry(
    variant: str,
    sha256: str,
    score: float = 0.9,
    interval: Sequence[float] | None = None,
    *,
    batch: int = 8,
    inside: Mapping[str, Any] | None = None,
    n: int = 100,
    **changes: Any,
) -> FrontierEntry:
    """Return an entry of one thread on a CPU; `inside` is its load of batches of `batch`."""
    content = {
        "variant": variant, "sha256": sha256, "budget": 1.0, "precision": "fp32",
        "runtime": "onnxruntime 1.31.1 CPU", "device": "a CPU, 2 cores",
        "score": {
            "name": "top-1", "value": score, "higher_is_better": True, "unit": "share", "n": n,
            "interval": list(interval or (score - 0.02, score + 0.02)), "data": "digits",
            "data_sha256": "d" * 64,
        },
        "in_process": {
            "threads": 1, "best_batch": batch, "batch_1": point(),
            f"batch_{batch}": inside or point(),
        },
        "top5": None, "grpc": None, "dominated_by": None, **changes,
    }  # fmt: skip
    return entry_of(content)
