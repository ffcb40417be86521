# SPDX-License-Identifier: Apache-2.0
"""Clean up an exported graph: readable names, no metadata, the same bytes each time."""

import ast
from collections import Counter
from collections.abc import Collection, Iterable

import onnx

from saccade.exporter.artefact.manifest import TensorSpec
from saccade.plugins.onnx_model import IR_VERSION, OPSET, all_nodes, graphs_in, set_nodes

# An output with a fixed name may have the same name as a value inside the graph.
OUTPUT_PREFIX = "saccade_output_"
_SCOPES = "pkg.torch.onnx.name_scopes"


def clean(
    proto: onnx.ModelProto, root: str, modules: Collection[str] = (), inside: set[str] | None = None
) -> onnx.ModelProto:
    """Return the same function without any trace of the machine that exported it.

    A node's name is `<part>/<operator>_<count>`, where the part is the child of module `root`
    that the node came from. Nodes outside any child belong to the part that reads their output.
    The names of nodes that came from one of `modules` (below `root`) are added to `inside`.
    """
    graph = proto.graph
    _cast_first(graph)
    parts = _parts(graph, root)
    _share_initializers(graph)
    _rename(graph, parts, root)
    if inside is not None:
        scopes = {f"{root}.{name}" for name in modules}
        inside.update(node.name for node in graph.node if not scopes.isdisjoint(_scopes(node)))
    return _bare(proto)


def tidy(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Clean a graph again that was rewritten after `clean`."""
    _share_initializers(proto.graph)
    return _bare(proto)


def _bare(proto: onnx.ModelProto) -> onnx.ModelProto:
    graph = proto.graph
    del graph.value_info[:]
    initializers = sorted(graph.initializer, key=lambda tensor: tensor.name)
    del graph.initializer[:]
    graph.initializer.extend(initializers)
    _strip(proto)
    return proto


def tensor_specs(values: Iterable[onnx.ValueInfoProto]) -> tuple[TensorSpec, ...]:
    """Return the tensor specs of the graph's inputs or outputs."""
    specs = []
    for value in values:
        kind = value.type.tensor_type
        axes = " ".join(axis.dim_param or str(axis.dim_value) for axis in kind.shape.dim)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name
        specs.append(TensorSpec(value.name, axes, dtype))
    return tuple(specs)


def flaws(proto: onnx.ModelProto, opset: int = OPSET) -> list[str]:
    """Return flaws that no file written by `export` has, as messages; empty if there are none."""
    problems = []
    opsets = {opset.domain: opset.version for opset in proto.opset_import}
    if opsets.get("") != opset or proto.ir_version != IR_VERSION:
        problems.append(f"unexpected opset {opsets.get('')}, IR version {proto.ir_version}")
    bytes_inputs = {
        value.name
        for value in proto.graph.input
        if value.type.tensor_type.elem_type == onnx.TensorProto.UINT8
    }
    for node in proto.graph.node:
        if bytes_inputs & set(node.input) and node.op_type != "Cast":
            problems.append(f"{node.op_type} reads the uint8 input before a Cast")
    return problems


def _cast_first(graph: onnx.GraphProto) -> None:
    """Make Shape nodes read the cast image: TensorRT accepts only Cast on a uint8 input."""
    for value in graph.input:
        readers = [node for node in graph.node if value.name in node.input]
        cast = next((node for node in readers if node.op_type == "Cast"), None)
        if cast is None:
            continue
        for node in readers:
            if node.op_type == "Shape":
                node.input[0] = cast.output[0]
        set_nodes(graph, [cast, *(node for node in graph.node if node is not cast)])


def _parts(graph: onnx.GraphProto, root: str) -> list[str]:
    """Return the part of each node; a node without one belongs to the part of its first reader."""
    parts = [_own_part(node, root) for node in graph.node]
    part_of_value: dict[str, str] = {}
    for index in reversed(range(len(parts))):
        node = graph.node[index]
        parts[index] = parts[index] or next(
            (part_of_value[name] for name in node.output if name in part_of_value), "output"
        )
        for name in node.input:
            part_of_value[name] = parts[index]
    return parts


def _own_part(node: onnx.NodeProto, root: str) -> str:
    for scope in _scopes(node):
        if scope.startswith(f"{root}."):
            return scope.split(".")[1].replace("_", "-")
    return ""


def _scopes(node: onnx.NodeProto) -> list[str]:
    """Return the modules that a node came from, outermost first."""
    text = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "[]")
    scopes: list[str] = ast.literal_eval(text)
    return scopes


def _share_initializers(graph: onnx.GraphProto) -> None:
    first: dict[bytes, str] = {}
    replaced: dict[str, str] = {}
    for tensor in sorted(graph.initializer, key=lambda initializer: initializer.name):
        bare = onnx.TensorProto()
        bare.CopyFrom(tensor)
        bare.ClearField("name")
        bare.ClearField("metadata_props")
        replaced[tensor.name] = first.setdefault(
            bare.SerializeToString(deterministic=True), tensor.name
        )
    used = {replaced.get(name, name) for node in all_nodes(graph) for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    for node in all_nodes(graph):
        node.input[:] = [replaced.get(name, name) for name in node.input]


def _rename(graph: onnx.GraphProto, parts: list[str], root: str) -> None:
    names = {"": "", **{value.name: value.name for value in graph.input}}
    for value in graph.output:
        names[value.name] = value.name.removeprefix(OUTPUT_PREFIX)
    counts: Counter[str] = Counter()
    for node, part in zip(graph.node, parts, strict=True):
        stem = f"{part}/{node.op_type}"
        node.name = f"{stem}_{counts[stem]}"
        counts[stem] += 1
        for index, output in enumerate(node.output):
            names.setdefault(output, node.name if index == 0 else f"{node.name}.{index}")
    for tensor in graph.initializer:
        if tensor.name.startswith(f"{root}."):
            names[tensor.name] = tensor.name.removeprefix(f"{root}.")
        else:
            names[tensor.name] = f"constant_{counts['constant']}"
            counts["constant"] += 1
        tensor.name = names[tensor.name]
    for node in graph.node:
        _rename_inside(node, names)
        node.input[:] = [names[name] for name in node.input]
        node.output[:] = [names[name] for name in node.output]
    for value in graph.output:
        value.name = names[value.name]


def _rename_inside(node: onnx.NodeProto, outer: dict[str, str]) -> None:
    """Rename values inside a Loop or If after it, and update references to outer values."""
    for graph in graphs_in(node):
        names, counts = dict(outer), Counter[str]()
        for index, value in enumerate(graph.input):
            names[value.name] = f"{node.name}/input_{index}"
        for inner in graph.node:
            stem = f"{node.name}/{inner.op_type}"
            inner.name = f"{stem}_{counts[stem]}"
            counts[stem] += 1
            for index, output in enumerate(inner.output):
                names[output] = inner.name if index == 0 else f"{inner.name}.{index}"
        for tensor in graph.initializer:
            names[tensor.name] = f"{node.name}/constant_{counts['constant']}"
            counts["constant"] += 1
        names[""] = ""
        for inner in graph.node:
            _rename_inside(inner, names)
            inner.input[:] = [names[name] for name in inner.input]
            inner.output[:] = [names[name] for name in inner.output]
        for value in (*graph.input, *graph.output, *graph.initializer):
            value.name = names[value.name]
        del graph.value_info[:]


def _strip(proto: onnx.ModelProto) -> None:
    graph = proto.graph
    proto.producer_name, proto.producer_version = "saccade", ""
    proto.domain, proto.model_version, graph.name = "", 0, "saccade"
    inside = [inner for node in all_nodes(graph) for inner in graphs_in(node)]
    for graph_inside in inside:
        graph_inside.name = "inside"
    for message in (
        proto,
        graph,
        *inside,
        *(
            value
            for graph_inside in inside
            for value in (*graph_inside.input, *graph_inside.output, *graph_inside.initializer)
        ),
        *all_nodes(graph),
        *graph.input,
        *graph.output,
        *graph.initializer,
        *proto.functions,
    ):
        message.ClearField("doc_string")
        message.ClearField("metadata_props")
    kept = [opset for opset in proto.opset_import if _is_used(opset.domain, proto)]
    del proto.opset_import[:]
    proto.opset_import.extend(sorted(kept, key=lambda opset: opset.domain))


def _is_used(domain: str, proto: onnx.ModelProto) -> bool:
    return domain in {"", *(node.domain for node in all_nodes(proto.graph))}
