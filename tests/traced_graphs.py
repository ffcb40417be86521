# SPDX-License-Identifier: Apache-2.0
"""Graphs that tests trace more than once, traced by the first of them: one takes seconds.

The gate still compares each exported file with its model, so a wrong graph does not go unnoticed.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from folder_store import stored


@contextmanager
def traced_once() -> Iterator[None]:
    """Within, exports in this process take a graph of the same model that was traced before."""
    import onnx

    from saccade.exporter.graph import tracing

    trace = tracing.trace_component

    def from_store(*given: Any) -> onnx.ModelProto:
        # A stored graph contains its weights.
        asked = (*given[:4], *(given[4:5] or ("fp32",)))

        def make(place: Path) -> None:
            names = set[str]()
            onnx.save(trace(*asked, None, names), place / "graph.onnx")
            (place / "float32.json").write_text(json.dumps(sorted(names)))

        place = stored(f"graph-{_digest(*asked)}", make)
        for names in given[6:]:
            names.update(json.loads((place / "float32.json").read_text()))
        return onnx.load(place / "graph.onnx")

    with mock.patch.object(tracing, "trace_component", from_store):
        yield


def _digest(
    model: Any, component: Any, samples: Any, outputs: Sequence[str], precision: str = "fp32"
) -> str:
    """Hash everything that a trace depends on, besides the sources: `stored` hashes those."""
    taken = [(spec.name, samples[spec.name].dtype.str, spec.shape) for spec in component.inputs]
    said = [model, getattr(model, "config", None), component.role, taken, (*outputs,), precision]
    digest = hashlib.sha256(repr(said).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tensor.dtype} {(*tensor.shape,)}\n".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:20]
