# SPDX-License-Identifier: Apache-2.0
"""Expected types of a variant: one for each matrix layer of its graph."""

from dataclasses import dataclass

from saccade.errors import SaccadeError, require
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest

# The parsers take any number in silence; up to here graphs were built and compared.
NEWEST_OPSET = 23


@dataclass(frozen=True)
class ExpectedTypes:
    """The matrix nodes of a variant's graph: all of its precision but those of float32."""

    name: str
    precision: str
    nodes: frozenset[str]
    float32_layers: frozenset[str]
    # Of a variant of several files, of which one may be a read-out as a whole.
    is_component: bool = False

    def of(self, node: str) -> str:
        """The precision that a node has."""
        return "fp32" if node in self.float32_layers else self.precision


def expected_types_of(artefact: ArtefactFolder, manifest: Manifest) -> ExpectedTypes:
    """Expected types of the nodes of an ONNX file, by the variant's name and manifest.

    Raises: SaccadeError if the file cannot be read, or has an opset that no engine was built of.
    """
    require("onnx", extra="export")
    from saccade.exporter.graph.layer_types import MATRIX_NODES
    from saccade.exporter.graph.limits import read_graph

    name, proto = manifest.variant.name, read_graph(artefact.file(manifest))
    opset = next((opset.version for opset in proto.opset_import if not opset.domain), 0)
    if opset > NEWEST_OPSET:
        raise SaccadeError(
            f"{name}: its ONNX file has opset {opset}, newer than {NEWEST_OPSET}, up to which "
            "TensorRT's parser was tried; it would guess in silence. Export it again with: "
            "saccade export CHECKPOINT"
        )
    nodes = frozenset(node.name for node in proto.graph.node if node.op_type in MATRIX_NODES)
    kept = frozenset(manifest.float32_layers)
    return ExpectedTypes(name, manifest.variant.precision, nodes, kept, bool(manifest.variant.role))
