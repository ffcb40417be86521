# SPDX-License-Identifier: Apache-2.0
"""Bisect a variant: find the first tensor of its graph that differs from another runner's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from saccade.core.errors import SaccadeError
from saccade.core.progress import Report, bar, progress_of, reporting
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest, by_parent
from saccade.exporter.gate.metrics import WHOLE, relative_error, tensor_limit
from saccade.exporter.gate.reference import Reference
from saccade.exporter.gate.report import GateReport
from saccade.exporter.graph.half_graph import widened
from saccade.exporter.graph.model_file import Load, graph_session, read_model
from saccade.exporter.graph.samples import calibration_inputs
from saccade.exporter.runtimes.runners import onnx_runner
from saccade.models.interface import Arrays, component_named
from saccade.plugins.native.library import available_library

_SAMPLES = 8
# Tensors probed in one run: an output in the middle of a graph prevents fusion at that point.
_AT_ONCE = 16
_TYPE_CHANGES = ("Cast", "QuantizeLinear", "DequantizeLinear")

Graph = tuple[onnx.ModelProto, Mapping[str, Load]]
Ask = Callable[[Sequence[str]], dict[str, np.ndarray]]  # node names -> their first outputs


@dataclass(frozen=True)
class Departure:
    """The result for one variant: the first node beyond the tolerance, otherwise the worst node.

    Units: error is the gate's `relative_error` with a floor of 1, over the whole tensor.
    """

    name: str
    against: str
    departs: bool
    node: str
    operator: str
    error: float
    tolerance: float
    compared: int  # number of nodes that both graphs have

    def to_text(self) -> str:
        """Describe the result in one sentence."""
        limit = f"{self.tolerance:g} is allowed"
        if not self.departs:
            return (
                f"{self.name}: no node of {self.compared} differs from {self.against}; the "
                f"largest relative error is {self.error:.2g}, at {self.node}; {limit}."
            )
        return (
            f"{self.name}: first differs from {self.against} at {self.node} ({self.operator}), by "
            f"a relative error of {self.error:.2g} over the whole tensor; {limit}."
        )


@dataclass(frozen=True)
class BisectReport:
    """The results for the variants of a folder that can be run."""

    folder: Path
    rows: tuple[Departure, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"folder": str(self.folder), "departures": [asdict(row) for row in self.rows]}


def bisect(gate: GateReport, *, progress: Report | None = bar) -> BisectReport:
    """Find the first node whose output differs, for each variant that the gate could run.

    A float32 variant is run as ONNX Runtime optimizes it, with the kernels of custom ops if they
    are built. It is compared with the same file without optimization and with function bodies. A
    variant of another precision is compared with the fp32 variant, node by node of equal name.

    Raises: SaccadeError if the folder is invalid or its checkpoint is missing.
    """
    folder = gate.artefacts or ArtefactFolder(gate.folder)
    measured = {report.name for report in gate.variants if report.parity is not None}
    manifests = [manifest for manifest in folder.manifests if manifest.variant.name in measured]
    rows = []
    with reporting(progress), progress_of("bisect", len(manifests)) as advance:
        for own in by_parent(manifests):
            reference = Reference(folder.parent_of(own[0]))
            for manifest in own:
                advance(0, note=manifest.variant.name)
                budget = reference.budget(manifest.exported)
                component = component_named(reference.variant(budget), manifest.variant.role)
                inputs = calibration_inputs(reference.sized(budget), component, _SAMPLES)
                rows.append(departure(folder, manifest, own, inputs))
                advance()
    return BisectReport(gate.folder, tuple(rows))


def departure(
    folder: ArtefactFolder, manifest: Manifest, manifests: Sequence[Manifest], inputs: Arrays
) -> Departure:
    """Find the first node of one variant that differs.

    Shapes: inputs as the graph's, [n ...].
    """
    entry, path = manifest.variant, folder.file(manifest)
    # ONNX Runtime's CPU kernels have no bf16, so only the structure is compared.
    own: Graph = read_model(path, manifest.file)
    if entry.precision == "bf16":
        own = widened(*own)
    other = _float32(manifest, manifests)
    if other is None:
        kernels = available_library() if manifest.custom_ops else None
        against, plain = "the same file without optimization", own
        answer = _asked(own, inputs, kernels=kernels)
    else:
        against, plain = other.variant.name, read_model(folder.file(other), other.file)
        answer = _asked(own, inputs, optimized=False)
    expected = _asked(plain, inputs, optimized=False)
    nodes = _shared_nodes(own, plain)
    if not nodes:
        raise SaccadeError(
            f"{path}: has no node in common with {against}. Export both again in one command."
        )
    tolerance = tensor_limit(entry.precision)
    node, error = _first(list(nodes), answer, expected, tolerance)
    return Departure(
        entry.name, against, error > tolerance, node, nodes[node], error, tolerance, len(nodes)
    )


def _first(names: list[str], ask: Ask, expected: Ask, tolerance: float) -> tuple[str, float]:
    """Name and error of the first node beyond the tolerance; otherwise of the worst node."""

    def errors_of(probes: list[str]) -> dict[str, float]:
        mine, theirs = ask(probes), expected(probes)
        return {name: relative_error(mine[name], theirs[name], WHOLE) for name in probes}

    step = -(-len(names) // _AT_ONCE)
    seen: dict[str, float] = {}
    # Probe nodes spread over the whole graph until one differs or all were probed.
    for offset in reversed(range(step)):
        errors = errors_of(names[offset::step])
        seen |= errors
        far = next((name for name, error in errors.items() if error > tolerance), None)
        if far is None:
            continue
        # Continue between it and the last node before it that agreed.
        index = names.index(far)
        between = [name for name in names[max(0, index - step + 1) : index] if name not in seen]
        seen |= errors_of(between) if between else {}
        first = next(name for name in (*between, far) if seen[name] > tolerance)
        return first, seen[first]
    worst = max(seen, key=lambda name: seen[name])
    return worst, seen[worst]


def _asked(
    graph: Graph, inputs: Arrays, optimized: bool = True, kernels: Path | None = None
) -> Ask:
    proto, weights = graph
    outputs = {node.name: node.output[0] for node in proto.graph.node}

    def ask(nodes: Sequence[str]) -> dict[str, np.ndarray]:
        del proto.graph.output[:]
        values = [onnx.ValueInfoProto(name=outputs[node]) for node in nodes]
        proto.graph.output.extend(values)
        session = graph_session(proto, weights, optimized=optimized, kernels=kernels)
        answers = onnx_runner(session)(inputs)
        return {node: answers[outputs[node]] for node in nodes}

    return ask


def _shared_nodes(own: Graph, other: Graph) -> dict[str, str]:
    """Map the nodes with numeric output that both graphs have to their operators, in order.

    A change of type adds nodes, so a numbered name can refer to another node. Two nodes are the
    same only if they also read from the same nodes.
    """
    mine, theirs = (_numeric_nodes(proto) for proto, _ in (own, other))
    return {name: node.operator for name, node in mine.items() if theirs.get(name) == node}


@dataclass(frozen=True)
class _Node:
    operator: str
    attributes: tuple[bytes, ...]
    sources: tuple[str, ...]  # nodes and graph inputs it reads from; "" for stored weights


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
    """Return the fp32 file of the same component, if the variant has another precision."""
    own = manifest.variant
    if own.precision == "fp32":
        return None
    wanted = own.role, own.setting, "fp32"
    return next(
        (
            other
            for other in manifests
            if (other.variant.role, other.variant.setting, other.variant.precision) == wanted
        ),
        None,
    )
