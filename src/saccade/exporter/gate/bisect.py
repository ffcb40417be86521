# SPDX-License-Identifier: Apache-2.0
"""Bisection of a variant: the first tensor of its graph that is too far from another runner's."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from saccade.errors import SaccadeError
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest
from saccade.exporter.gate.gate import Reference
from saccade.exporter.gate.metrics import WHOLE, relative_error, tensor_limit
from saccade.exporter.gate.report import GateReport
from saccade.exporter.graph.half_graph import widened_bytes
from saccade.exporter.runtimes.runners import onnx_runner, onnx_session
from saccade.models.interface import Arrays
from saccade.plugins.native.library import available_library
from saccade.progress import progress

_SAMPLES = 8
# Tensors looked at in one run: an output in the midst of a graph keeps it from being fused there.
_AT_ONCE = 16
_TYPE_CHANGES = ("Cast", "QuantizeLinear", "DequantizeLinear")

Ask = Callable[[Sequence[str]], dict[str, np.ndarray]]  # node names -> their first outputs


@dataclass(frozen=True)
class Departure:
    """One variant: the first node beyond the tolerance, or the worst one where none is.

    Units: error is the gate's `relative_error`, with a floor of 1: of the whole tensor.
    """

    name: str
    against: str
    departs: bool
    node: str
    operator: str
    error: float
    tolerance: float
    compared: int  # nodes that both graphs have

    def to_text(self) -> str:
        """One sentence."""
        limit = f"{self.tolerance:g} is allowed"
        if not self.departs:
            return (
                f"{self.name}: no departure from {self.against} in {self.compared} nodes; the "
                f"largest is {self.error:.2g}, at {self.node}; {limit}."
            )
        return (
            f"{self.name}: departs from {self.against} at {self.node} ({self.operator}), by a "
            f"relative error of {self.error:.2g} of the whole tensor; {limit}."
        )


@dataclass(frozen=True)
class BisectReport:
    """The variants of a folder that can be run."""

    folder: Path
    rows: tuple[Departure, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        return {"folder": str(self.folder), "departures": [asdict(row) for row in self.rows]}


def bisect(gate: GateReport) -> BisectReport:
    """Find, for each variant that the gate could run, the first node whose answer departs.

    A float32 variant as ONNX Runtime optimises it, with the ops' kernels where they are built,
    is held against the same file with every node as it stands and the ops as their bodies; a
    variant of another type against the fp32 variant, by the nodes' names.

    Raises: SaccadeError if the folder is not in order, or its checkpoint is not there.
    """
    folder = gate.artefacts or ArtefactFolder(gate.folder)
    measured = {report.name for report in gate.variants if report.parity is not None}
    manifests = [manifest for manifest in folder.manifests if manifest.variant.name in measured]
    reference = Reference(folder.parent)
    rows = []
    with progress("bisect", len(manifests)) as advance:
        for manifest in manifests:
            advance(0, note=manifest.variant.name)
            budget = reference.budget(manifest.variant)
            model = reference.variant(budget)
            samples = reference.samples(model, budget, manifest.variant.role)
            inputs = {name: array[:_SAMPLES] for name, array in samples.inputs.items()}
            rows.append(departure(folder, manifest, manifests, inputs))
            advance()
    return BisectReport(gate.folder, tuple(rows))


def departure(
    folder: ArtefactFolder, manifest: Manifest, manifests: Sequence[Manifest], inputs: Arrays
) -> Departure:
    """The first node of one variant that departs.

    Shapes: inputs as the graph's, [n ...].
    """
    entry, path = manifest.variant, folder.file(manifest)
    # ONNX Runtime's CPU kernels have no bf16: there the structure is compared.
    own = widened_bytes(path) if entry.precision == "bf16" else path.read_bytes()
    other = _float32(manifest, manifests)
    if other is None:
        kernels = available_library() if manifest.custom_ops else None
        against, plain = "its nodes as they stand", own
        answer = _asked(own, inputs, kernels=kernels)
    else:
        against, plain = other.variant.name, folder.file(other).read_bytes()
        answer = _asked(own, inputs, optimized=False)
    expected = _asked(plain, inputs, optimized=False)
    nodes = _shared_nodes(own, plain)
    if not nodes:
        raise SaccadeError(
            f"{path}: shares no node with {against}. Export both again, in one command."
        )
    tolerance = tensor_limit(entry.precision)
    node, error = _first(list(nodes), answer, expected, tolerance)
    return Departure(
        entry.name, against, error > tolerance, node, nodes[node], error, tolerance, len(nodes)
    )


def _first(names: list[str], ask: Ask, expected: Ask, tolerance: float) -> tuple[str, float]:
    """Name and error of the first node beyond the tolerance; the worst one where none is."""

    def errors_of(probes: list[str]) -> dict[str, float]:
        mine, theirs = ask(probes), expected(probes)
        return {name: relative_error(mine[name], theirs[name], WHOLE) for name in probes}

    step = -(-len(names) // _AT_ONCE)
    seen: dict[str, float] = {}
    # Spread over the whole graph, again and again until every node was asked or one departs.
    for offset in reversed(range(step)):
        errors = errors_of(names[offset::step])
        seen |= errors
        far = next((name for name, error in errors.items() if error > tolerance), None)
        if far is None:
            continue
        # What lies between it and the one before that was near.
        index = names.index(far)
        between = [name for name in names[max(0, index - step + 1) : index] if name not in seen]
        seen |= errors_of(between) if between else {}
        first = next(name for name in (*between, far) if seen[name] > tolerance)
        return first, seen[first]
    worst = max(seen, key=lambda name: seen[name])
    return worst, seen[worst]


def _asked(
    model: bytes, inputs: Arrays, optimized: bool = True, kernels: Path | None = None
) -> Ask:
    proto = onnx.load_model_from_string(model)
    outputs = {node.name: node.output[0] for node in proto.graph.node}

    def ask(nodes: Sequence[str]) -> dict[str, np.ndarray]:
        del proto.graph.output[:]
        values = [onnx.ValueInfoProto(name=outputs[node]) for node in nodes]
        proto.graph.output.extend(values)
        session = onnx_session(proto.SerializeToString(), optimized=optimized, kernels=kernels)
        answers = onnx_runner(session)(inputs)
        return {node: answers[outputs[node]] for node in nodes}

    return ask


def _shared_nodes(own: bytes, other: bytes) -> dict[str, str]:
    """Operator by name of the nodes with a number as answer that both graphs have, in order.

    A change of type adds nodes, so that a name with a number at its end can go to another one:
    a node is the same only if it also reads from the same ones.
    """
    mine, theirs = (_numeric_nodes(onnx.load_model_from_string(file)) for file in (own, other))
    return {name: node.operator for name, node in mine.items() if theirs.get(name) == node}


@dataclass(frozen=True)
class _Node:
    operator: str
    attributes: tuple[bytes, ...]
    sources: tuple[str, ...]  # nodes and graph inputs it reads from, "" for what is stored


def _numeric_nodes(proto: onnx.ModelProto) -> dict[str, _Node]:
    from saccade.exporter.graph.layer_types import element_types

    types = element_types(proto)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
    makers = {name: node for node in proto.graph.node for name in node.output}
    inputs = {value.name for value in proto.graph.input}

    def source(name: str) -> str:
        while name in makers and makers[name].op_type in _TYPE_CHANGES:
            name = makers[name].input[0]
        return makers[name].name if name in makers else name if name in inputs else ""

    return {
        node.name: _Node(
            node.op_type,
            tuple(sorted(attribute.SerializeToString() for attribute in node.attribute)),
            tuple(map(source, node.input)),
        )
        for node in proto.graph.node
        if types.get(node.output[0]) in floats and node.op_type not in _TYPE_CHANGES
    }


def _float32(manifest: Manifest, manifests: Sequence[Manifest]) -> Manifest | None:
    """The fp32 file of the same component, for a variant of another type."""
    entry = manifest.variant
    if entry.precision == "fp32":
        return None
    wanted = (entry.role, entry.setting, "fp32")
    for candidate in manifests:
        if (
            candidate.variant.role,
            candidate.variant.setting,
            candidate.variant.precision,
        ) == wanted:
            return candidate
    return None
