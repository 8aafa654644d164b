# SPDX-License-Identifier: Apache-2.0
"""Operations that TensorRT's builder takes as plugins of a library of ours: which library, which names, which fields.

A plugin is known to a builder once its library is loaded into the bindings' registry, and to a runtime likewise: a plan
with plugins needs the library wherever it runs, so an engine's `tensorrt.json` names it. The kernels are written for
bfloat16 and for the extents that `limits` states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from engines.graph.ir import Graph, Operation

LIBRARY: Final = "libifab_plugins.so"
"""The library with all of them, by the name that an engine's configuration gives."""
VERSION: Final = "1"
NAMESPACE: Final = "ifab"
NAMES: Final = {"packed_attention": "ifab_packed_attention", "gated_unit": "ifab_gated_unit", "norm": "ifab_norm"}
"""Operation -> plugin."""
HEAD_SIZES: Final = (64, 128)
ROW_TOKENS_STEP: Final = 16
ROW_TOKENS_MAX: Final = 8192
ROW_VALUES_STEP: Final = 8
ROW_VALUES_MAX: Final = 32_768
"""What a row of norm or gated unit may hold: values that are read in 16 bytes, and as many as one block holds."""


class BuilderRefusedError(RuntimeError):
    """The vendor's builder refused the network or failed; the message carries its last words."""


def kinds_of(graph: Graph) -> frozenset[str]:
    """The operations of a network that need a plugin."""
    return frozenset(operation.kind for operation in graph.operations if operation.kind in NAMES)


def limits(*, heads: int, kv_heads: int, head_size: int, row_tokens: int) -> str | None:
    """Why the attention kernel does not take a model; None where it does."""
    if head_size not in HEAD_SIZES:
        return f"heads of {head_size} values, and the kernel takes {' or '.join(map(str, HEAD_SIZES))}"
    if heads % kv_heads:
        return f"{heads} heads of queries for {kv_heads} heads of keys, which is no whole number each"
    if row_tokens % ROW_TOKENS_STEP or not 0 < row_tokens <= ROW_TOKENS_MAX:
        return f"rows of {row_tokens} tokens, and the kernel takes multiples of {ROW_TOKENS_STEP} to {ROW_TOKENS_MAX}"
    return None


def row_limits(width: int) -> str | None:
    """Why the kernels of norm and gated unit do not take rows of so many values; None where they do."""
    if width % ROW_VALUES_STEP or not 0 < width <= ROW_VALUES_MAX:
        return f"rows of {width} values, and the kernels take multiples of {ROW_VALUES_STEP} to {ROW_VALUES_MAX}"
    return None


def load(trt: Any, library: Path) -> None:
    """Loads a library's plugins into the bindings' registry, where they stay for as long as the process lives.

    Args:
        trt: The bindings' module.
        library: The file.

    Raises:
        BuilderRefusedError: There is no such file, or the registry does not take it.
    """
    if not library.is_file():
        raise BuilderRefusedError(f"the plugin library {library} is not there")
    registry = trt.get_plugin_registry()
    if _creator(registry, NAMES["packed_attention"]) is None and registry.load_library(str(library)) is None:
        raise BuilderRefusedError(f"the plugin library {library} does not load; the builder's log says why")


def offered(trt: Any) -> frozenset[str]:
    """The operations whose plugins are in the registry."""
    registry = trt.get_plugin_registry()
    return frozenset(kind for kind, name in NAMES.items() if _creator(registry, name) is not None)


def create(trt: Any, operation: Operation) -> Any:
    """Makes the plugin of an operation, for a network.

    Raises:
        BuilderRefusedError: Its library is not loaded, or it has no kernel for these types or extents.
    """
    name = NAMES[operation.kind]
    if operation.inputs[0].dtype != "bfloat16":
        raise BuilderRefusedError(f"{operation.kind} {operation.name}: {name} takes bfloat16 alone")
    creator = _creator(trt.get_plugin_registry(), name)
    if creator is None:
        raise BuilderRefusedError(
            f"{operation.kind} {operation.name} needs the plugin {name} {VERSION} of {NAMESPACE}, which no loaded "
            f"library has: load {LIBRARY} before"
        )
    kind = trt.PluginFieldType
    values = _fields(operation)  # held here, since a field only points at its array
    fields = [
        trt.PluginField(key, value, kind.FLOAT32 if value.dtype == np.float32 else kind.INT32)
        for key, value in values.items()
    ]
    plugin = creator.create_plugin(name, trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
    if plugin is None:
        raise BuilderRefusedError(f"{operation.kind} {operation.name}: {name} refuses {operation.settings}")
    return plugin


def _fields(operation: Operation) -> dict[str, np.ndarray[Any, Any]]:
    """Fields by name, in the types that the plugins declare: what is a float here is float32, everything else int32."""
    return {
        key: np.array([value], np.float32 if isinstance(value, float) else np.int32)
        for key, value in operation.settings.items()
    }


def _creator(registry: Any, name: str) -> Any:
    return registry.get_creator(name, VERSION, NAMESPACE)
