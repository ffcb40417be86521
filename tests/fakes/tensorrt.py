# SPDX-License-Identifier: Apache-2.0
"""The calls of `tensorrt` that saccade makes, recorded: a plan is the JSON of what was asked.

Words in an ONNX file's doc string make it misbehave: ABORT ends the process while it parses, HANG
never ends the build, REFUSE gives no plan. A plan that begins with ABORT ends its process too.
With COMPUTE the plan has the graph in it, and gives the answers of ONNX Runtime.
"""

import ctypes
import json
import os
import time
from enum import Enum, IntEnum
from types import SimpleNamespace

import numpy as np
import onnx

__version__ = "10.16.0.fake"
_CALLS = []
_LAYERS = {
    "MatMul": "MATRIX_MULTIPLY",
    "Gemm": "MATRIX_MULTIPLY",
    "DequantizeLinear": "DEQUANTIZE",
    "QuantizeLinear": "QUANTIZE",
    "Cast": "CAST",
}


def _record(call, *values):
    _CALLS.append([call, *values])


class DataType(Enum):
    FLOAT, HALF, BF16, INT8, INT32, INT64, UINT8, BOOL = range(8)


_TYPES = {
    onnx.TensorProto.FLOAT: DataType.FLOAT,
    onnx.TensorProto.FLOAT16: DataType.HALF,
    onnx.TensorProto.BFLOAT16: DataType.BF16,
    onnx.TensorProto.INT8: DataType.INT8,
    onnx.TensorProto.INT64: DataType.INT64,
    onnx.TensorProto.UINT8: DataType.UINT8,
}


class TensorIOMode(Enum):
    INPUT, OUTPUT = range(2)


class LayerInformationFormat(Enum):
    JSON = 0


class MemoryPoolType(Enum):
    WORKSPACE = 0


class NetworkDefinitionCreationFlag(IntEnum):
    STRONGLY_TYPED = 1


class BuilderFlag(Enum):
    TF32 = 0


class ProfilingVerbosity(Enum):
    LAYER_NAMES_ONLY, DETAILED = range(2)


class ILogger:
    class Severity(IntEnum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class IProgressMonitor:
    pass


def get_plugin_registry():
    def load_library(path):
        call = ["load_library", os.path.basename(path)]  # noqa: PTH119
        if call in _CALLS:  # the real one refuses plugins that are registered
            return None
        _record(*call)
        return object()

    return SimpleNamespace(load_library=load_library)


class Builder:
    def __init__(self, logger):
        self.logger = logger
        self.max_threads = 0

    def create_network(self, flags):
        _record("create_network", flags)
        return SimpleNamespace(model=None)

    def create_builder_config(self):
        return Config()

    def create_optimization_profile(self):
        return SimpleNamespace(set_shape=lambda *shape: _record("set_shape", *shape))

    def build_serialized_network(self, network, config):
        words = network.model.doc_string
        config.progress_monitor.phase_start("Building", None, 2)
        config.progress_monitor.step_complete("Building", 0)
        if "HANG" in words:
            open("hanging", "w").close()  # noqa: PTH123
            time.sleep(600)
        if "REFUSE" in words:
            self.logger.log(ILogger.Severity.ERROR, "no tactic for node 7")
            return None
        _record("verbosity", config.profiling_verbosity.name)
        specs = {
            kind: [[tensor.name, tensor.dtype.name, list(tensor.shape)] for tensor in tensors]
            for kind, tensors in (("inputs", network.inputs), ("outputs", network.outputs))
        }
        if "COMPUTE" in words:
            specs["onnx"] = network.model.SerializeToString().hex()
        return json.dumps({"calls": _CALLS, **specs}).encode()


class Config:
    def set_memory_pool_limit(self, pool, size):
        _record("set_memory_pool_limit", pool.name, size)

    def clear_flag(self, flag):
        _record("clear_flag", flag.name)

    def add_optimization_profile(self, profile):
        _record("add_optimization_profile")
        return 0

    def create_timing_cache(self, data):
        return SimpleNamespace(data=data, serialize=lambda: data + b"+")

    def set_timing_cache(self, cache, ignore_mismatch):
        _record("set_timing_cache", len(cache.data), ignore_mismatch)
        self.cache = cache
        return not cache.data.startswith(b"other")

    def get_timing_cache(self):
        return self.cache


class OnnxParser:
    def __init__(self, network, logger):
        self.network = network
        self.num_errors = 0

    def get_error(self, index):
        return "node 3 is unknown"

    def parse(self, data, path=None):
        model = onnx.ModelProto.FromString(data)
        if "ABORT" in model.doc_string:
            os.abort()
        if "UNKNOWN" in model.doc_string:
            self.num_errors = 1
            return False
        _fill(self.network, model)
        return True


def _fill(network, model):
    graph = onnx.shape_inference.infer_shapes(model).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    values = (*graph.input, *graph.value_info, *graph.output)
    kinds |= {value.name: value.type.tensor_type.elem_type for value in values}

    def tensor(name):
        return SimpleNamespace(name=name, dtype=_TYPES[kinds[name]])

    def binding(value):
        bound = tensor(value.name)
        axes = value.type.tensor_type.shape.dim
        bound.shape = tuple(-1 if axis.dim_param else axis.dim_value for axis in axes)
        return bound

    def layer(node):
        inputs, outputs = [tensor(n) for n in node.input], [tensor(n) for n in node.output]
        return SimpleNamespace(
            name=node.name,
            type=SimpleNamespace(name=_LAYERS.get(node.op_type, "OTHER")),
            num_inputs=len(inputs),
            num_outputs=len(outputs),
            get_input=inputs.__getitem__,
            get_output=outputs.__getitem__,
        )

    layers = [layer(node) for node in graph.node]
    network.model = model
    network.num_layers, network.get_layer = len(layers), layers.__getitem__
    network.inputs = [binding(value) for value in graph.input]
    network.outputs = [binding(value) for value in graph.output]
    network.num_inputs, network.get_input = len(network.inputs), network.inputs.__getitem__
    network.num_outputs, network.get_output = len(network.outputs), network.outputs.__getitem__


class Runtime:
    def __init__(self, logger):
        self.logger = logger

    def deserialize_cuda_engine(self, data):
        if data.startswith(b"ABORT"):
            os.abort()
        if not data.startswith(b"{"):
            self.logger.log(ILogger.Severity.ERROR, "magic tag does not match")
            return None
        return Engine(json.loads(data))


class Engine:
    def __init__(self, plan):
        self.tensors = {name: ("INPUT", kind, shape) for name, kind, shape in plan["inputs"]}
        self.tensors |= {name: ("OUTPUT", kind, shape) for name, kind, shape in plan["outputs"]}
        self.num_io_tensors = len(self.tensors)
        self.onnx = bytes.fromhex(plan.get("onnx", ""))

    def get_tensor_name(self, index):
        return list(self.tensors)[index]

    def get_tensor_mode(self, name):
        return TensorIOMode[self.tensors[name][0]]

    def get_tensor_dtype(self, name):
        return DataType[self.tensors[name][1]]

    def get_tensor_shape(self, name):
        return self.tensors[name][2]

    def create_engine_inspector(self):
        layer = {
            "Metadata": "[ONNX Layer: logits]",
            "Inputs": [{"Format/Datatype": "Row major linear FP32"}],
            "Outputs": [{"Format/Datatype": "Row major linear FP32"}],
        }
        said = json.dumps({"Layers": [layer]})
        return SimpleNamespace(get_engine_information=lambda kind: said)

    def create_execution_context(self):
        return Computing(self.tensors, self.onnx) if self.onnx else Context(self.tensors)


class Context:
    """Answers with the sum of the first input's first row, everywhere."""

    def __init__(self, tensors):
        self.tensors, self.shapes, self.addresses = tensors, {}, {}

    def set_input_shape(self, name, shape):
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name):
        batch = next(iter(self.shapes.values()))[0]
        return (batch, *self.tensors[name][2][1:])

    def execute_async_v3(self, stream):
        name, shape = next(iter(self.shapes.items()))
        row = np.ctypeslib.as_array(
            (ctypes.c_ubyte * int(np.prod(shape))).from_address(self.addresses[name])
        )
        total = float(row.reshape(shape[0], -1)[0].sum())
        for tensor, (mode, _, _) in self.tensors.items():
            if mode == "OUTPUT":
                count = int(np.prod(self.get_tensor_shape(tensor)))
                floats = (ctypes.c_float * count).from_address(self.addresses[tensor])
                floats[:] = [total] * count
        return True


class Computing(Context):
    """Answers as ONNX Runtime does."""

    def __init__(self, tensors, graph):
        import onnxruntime

        super().__init__(tensors)
        self.session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])

    def execute_async_v3(self, stream):
        outputs = [name for name, (mode, _, _) in self.tensors.items() if mode == "OUTPUT"]
        inputs = {name: self.array(name, shape) for name, shape in self.shapes.items()}
        for name, answer in zip(outputs, self.session.run(outputs, inputs), strict=True):
            self.array(name, answer.shape)[...] = answer
        return True

    def array(self, name, shape):
        kind = {"UINT8": ctypes.c_ubyte, "FLOAT": ctypes.c_float}[self.tensors[name][1]]
        count = int(np.prod(shape))
        memory = (kind * count).from_address(self.addresses[name])
        return np.ctypeslib.as_array(memory).reshape(shape)
