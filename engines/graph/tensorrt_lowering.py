# SPDX-License-Identifier: Apache-2.0
"""Hands a recorded network to TensorRT's builder, one layer an operation, and serializes the plan.

Works with the Python bindings of TensorRT 10.6 and later and of TensorRT for RTX: the module is passed in, because the
packages differ in name (`tensorrt_bindings`, `tensorrt`, `tensorrt_rtx`) and none can be a dependency here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from engines.graph import plugins
from engines.graph.ir import Graph, GraphError, Operation, Tensor
from engines.graph.plugins import BuilderRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class ProfileRange:
    """Extents of one dynamic extent: smallest, the one to optimise for, largest."""

    smallest: int
    optimum: int
    largest: int


def build_plan(
    trt: Any,
    logger: Any,
    graph: Graph,
    ranges: Mapping[str, ProfileRange],
    *,
    workspace_bytes: int,
    detailed: bool = False,
    timing_cache: bytes | None = None,
) -> tuple[bytes, bytes]:
    """Builds a serialized plan of a strongly typed network.

    Args:
        trt: The bindings' module.
        logger: A `trt.ILogger`; its messages explain a refusal.
        graph: The network.
        ranges: The range of every dynamic extent that inputs name.
        workspace_bytes: Limit of scratch memory while building and running.
        detailed: Whether the plan keeps layer names for profiling.
        timing_cache: What an earlier build on the same card learned, empty for the first; none is kept where absent
            (TensorRT for RTX has none).

    Returns:
        The plan, and the timing cache to keep; empty where none is kept.

    Raises:
        BuilderRefusedError: The builder gave nothing, or the network has a plugin whose library is not loaded.
        GraphError: The network has an operation that this lowering does not know.
    """
    builder = trt.Builder(logger)
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    keep = lower(trt, network, graph)
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace_bytes)
    if detailed:
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    cache = None if timing_cache is None else config.create_timing_cache(timing_cache)
    if cache is not None:
        config.set_timing_cache(cache, False)
    profile = builder.create_optimization_profile()
    for tensor in graph.inputs:
        bounds = [
            tuple(getattr(ranges[extent], end) if isinstance(extent, str) else extent for extent in tensor.shape)
            for end in ("smallest", "optimum", "largest")
        ]
        profile.set_shape(tensor.name, *bounds)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    del keep
    if plan is None:
        raise BuilderRefusedError("the builder gave no plan; its log says why")
    return bytes(plan), b"" if cache is None else bytes(cache.serialize())


def lower(trt: Any, network: Any, graph: Graph) -> list[Any]:
    """Adds every input, operation and output of a graph to a network.

    Returns:
        Arrays that the network points into; they must live until the plan is built.
    """
    lowering = _Lowering(trt, network, graph)
    for tensor in graph.inputs:
        shape = tuple(-1 if isinstance(extent, str) else extent for extent in tensor.shape)
        lowering.values[tensor.name] = network.add_input(tensor.name, lowering.dtype(tensor.dtype), shape)
    for operation in graph.operations:
        lowering.add(operation)
    for tensor in graph.outputs:
        value = lowering.values[tensor.name]
        value.name = tensor.name
        network.mark_output(value)
    return lowering.keep


class _Lowering:
    def __init__(self, trt: Any, network: Any, graph: Graph) -> None:
        self.trt, self.network, self.graph = trt, network, graph
        self.values: dict[str, Any] = {}
        self.keep: list[Any] = []

    def dtype(self, word: str) -> Any:
        return {
            "bool": self.trt.bool,
            "int32": self.trt.int32,
            "float32": self.trt.float32,
            "float16": self.trt.float16,
            "bfloat16": self.trt.bfloat16,
            "fp8_e4m3": self.trt.fp8,
        }[word]

    def add(self, operation: Operation) -> None:
        method = self._plugin if operation.kind in plugins.NAMES else getattr(self, f"_{operation.kind}", None)
        if method is None:
            raise GraphError(f"the lowering does not know the operation {operation.kind}")
        layer = method(operation, *(self.values[tensor.name] for tensor in operation.inputs))
        if layer is None:
            raise BuilderRefusedError(f"the builder refused {operation.kind} {operation.name}")
        layer.name = layer.metadata = operation.name  # kernels that the builder names itself keep the metadata
        for index, tensor in enumerate((operation.output, *operation.beside)):
            self.values[tensor.name] = layer.get_output(index)

    def _constant(self, operation: Operation) -> Any:
        value = np.ascontiguousarray(self.graph.constants[operation.output.name])
        self.keep.append(value)
        weights = self.trt.Weights(self.dtype(operation.output.dtype), value.ctypes.data, value.size)
        # The API has no constant without extents of its own for scalars: an empty tuple is one.
        return self.network.add_constant(tuple(value.shape), weights)

    def _identity(self, operation: Operation, x: Any) -> Any:
        return self.network.add_identity(x)

    def _gather(self, operation: Operation, data: Any, indices: Any) -> Any:
        return self.network.add_gather(data, indices, operation.settings["axis"])

    def _matmul(self, operation: Operation, a: Any, b: Any) -> Any:
        kind = self.trt.MatrixOperation
        transposed = [
            kind.TRANSPOSE if operation.settings[key] else kind.NONE for key in ("transpose_a", "transpose_b")
        ]
        return self.network.add_matrix_multiply(a, transposed[0], b, transposed[1])

    def _elementwise(self, operation: Operation, a: Any, b: Any) -> Any:
        kind = self.trt.ElementWiseOperation
        ops = {
            "add": kind.SUM,
            "sub": kind.SUB,
            "mul": kind.PROD,
            "div": kind.DIV,
            "equal": kind.EQUAL,
            "greater": kind.GREATER,
            "and": kind.AND,
        }
        return self.network.add_elementwise(a, b, ops[operation.settings["op"]])

    def _unary(self, operation: Operation, x: Any) -> Any:
        kind = self.trt.UnaryOperation
        ops = {"sqrt": kind.SQRT, "reciprocal": kind.RECIP, "exp": kind.EXP, "negate": kind.NEG}
        return self.network.add_unary(x, ops[operation.settings["op"]])

    def _sigmoid(self, operation: Operation, x: Any) -> Any:
        return self.network.add_activation(x, self.trt.ActivationType.SIGMOID)

    def _mean(self, operation: Operation, x: Any) -> Any:
        return self.network.add_reduce(x, self.trt.ReduceOperation.AVG, 1 << operation.settings["axis"], True)

    def _softmax(self, operation: Operation, x: Any) -> Any:
        layer = self.network.add_softmax(x)
        layer.axes = 1 << operation.settings["axis"]
        return layer

    def _reshape(self, operation: Operation, x: Any) -> Any:
        layer = self.network.add_shuffle(x)
        layer.reshape_dims = tuple(-1 if isinstance(extent, str) else extent for extent in operation.output.shape)
        return layer

    def _transpose(self, operation: Operation, x: Any) -> Any:
        layer = self.network.add_shuffle(x)
        layer.first_transpose = self.trt.Permutation(list(operation.settings["permutation"]))
        return layer

    def _cast(self, operation: Operation, x: Any) -> Any:
        return self.network.add_cast(x, self.dtype(operation.output.dtype))

    def _select(self, operation: Operation, condition: Any, a: Any, b: Any) -> Any:
        return self.network.add_select(condition, a, b)

    def _quantize(self, operation: Operation, x: Any, scale: Any) -> Any:
        return self.network.add_quantize(x, scale, self.trt.fp8)

    def _dequantize(self, operation: Operation, x: Any, scale: Any) -> Any:
        return self.network.add_dequantize(x, scale, self.dtype(operation.output.dtype))

    def _plugin(self, operation: Operation, *inputs: Any) -> Any:
        if not hasattr(self.network, "add_plugin_v3"):
            raise BuilderRefusedError(f"{operation.kind} {operation.name} is a plugin, and this builder takes none")
        plugin = plugins.create(self.trt, operation)
        self.keep.append(plugin)
        return self.network.add_plugin_v3(list(inputs), [], plugin)


def dynamic_extents(graph: Graph) -> list[str]:
    """Names of the dynamic extents of a graph's inputs, each once, in order."""
    names: dict[str, Tensor] = {}
    for tensor in graph.inputs:
        for extent in tensor.shape:
            if isinstance(extent, str):
                names.setdefault(extent, tensor)
    return list(names)
