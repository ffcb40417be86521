# SPDX-License-Identifier: Apache-2.0
"""The type that a variant promises for each matrix layer of its graph."""

from dataclasses import dataclass

from saccade.core.errors import SaccadeError, require
from saccade.core.schema import AGAIN
from saccade.exporter.artefact.folder import ArtefactFolder
from saccade.exporter.artefact.manifest import Manifest

# The parsers accept any opset silently; up to this one, graphs were built and compared.
NEWEST_OPSET = 23


@dataclass(frozen=True)
class ExpectedTypes:
    """The matrix nodes of a variant's graph: all of its precision, except those in float32."""

    name: str
    precision: str
    nodes: frozenset[str]
    float32_layers: frozenset[str]
    # True for variants of several files, where one file may be a read-out as a whole.
    is_component: bool = False

    def of(self, node: str) -> str:
        """Return the precision of a node."""
        return "fp32" if node in self.float32_layers else self.precision


def expected_types_of(artefact: ArtefactFolder, manifest: Manifest) -> ExpectedTypes:
    """Return the types that the variant's name and manifest promise for the nodes of its file.

    Raises: SaccadeError if the file cannot be read or has an opset that was never tested.
    """
    require("onnx", extra="export")
    from saccade.exporter.graph.layer_types import MATRIX_NODES
    from saccade.exporter.graph.model_file import read_model

    name = manifest.variant.name
    proto, _ = read_model(artefact.file(manifest), manifest.file)
    opset = next((opset.version for opset in proto.opset_import if not opset.domain), 0)
    if opset > NEWEST_OPSET:
        raise SaccadeError(
            f"{name}: its ONNX file has opset {opset}, expected at most {NEWEST_OPSET}: the "
            "newest that was tested with TensorRT's parser, which accepts any opset silently. "
            f"{AGAIN}"
        )
    nodes = frozenset(node.name for node in proto.graph.node if node.op_type in MATRIX_NODES)
    kept = frozenset(manifest.float32_layers)
    return ExpectedTypes(name, manifest.variant.precision, nodes, kept, bool(manifest.variant.role))
