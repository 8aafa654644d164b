# SPDX-License-Identifier: Apache-2.0
"""TensorRT's builder, found or missed in one sentence.

A plan is compiled for the card that is there: kernels are timed on it. So a build needs the vendor's Python package and
a card of the tier. TensorRT for RTX compiles without a card; what it compiles runs on cards of the 8.x and 12.x kind.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from engines.graph import plugins
from engines.graph.plugins import BuilderRefusedError
from engines.graph.tensorrt_lowering import ProfileRange, build_plan, dynamic_extents
from services.common.errors import FailedPreconditionError, NotFoundError

if TYPE_CHECKING:
    from engines.graph.ir import Graph

PACKAGES: Final = ("tensorrt", "tensorrt_bindings")
"""The vendor's package under its names; `tensorrt_bindings` is what the cut one of older releases is called."""
RTX_PACKAGE: Final = "tensorrt_rtx"
WORKSPACE_BYTES: Final = 8 << 30
_DRIVER = Path("/proc/driver/nvidia/version")
_NATIVE_VARIABLE: Final = "IFAB_ENGINE_LIBRARY"
"""Names the native library's file where it is not the checkout's own, as for workers."""
_PLUGINS_FOLDER: Final = "plugins"


class Compiler(Protocol):
    """Makes plans of networks."""

    @property
    def version(self) -> str:
        """Of the runtime that executes the plans, such as `10.14.1`."""
        ...

    @property
    def plugins(self) -> Path | None:
        """The library with the plugins that its plans may use; None where there is none."""
        ...

    def compile(self, graph: Graph, *, rows: int, slots: int) -> bytes:
        """See `Builder.compile`."""
        ...


@dataclass(frozen=True, slots=True)
class Builder:
    """A builder that is here."""

    module: Any
    version: str
    """Such as `10.14.1`."""
    plugins: Path | None = None
    """The library with kernels of our own, where it is there and this builder takes plugins."""

    def compile(self, graph: Graph, *, rows: int, slots: int) -> bytes:
        """Compiles a mining network.

        Args:
            graph: The network.
            rows: Most rows of a launch; the builder optimises for these.
            slots: Most prompts of a launch.

        Raises:
            FailedPreconditionError: The builder refused; its last words are in the message.
        """
        log = _logger(self.module)
        largest = {"rows": rows, "prompts": slots}
        ranges = {name: ProfileRange(1, largest[name], largest[name]) for name in dynamic_extents(graph)}
        try:
            if self.plugins is not None and plugins.kinds_of(graph):
                plugins.load(self.module, self.plugins)
            return build_plan(self.module, log, graph, ranges, workspace_bytes=WORKSPACE_BYTES)[0]
        except BuilderRefusedError as error:
            last = log.last or str(error)
            raise FailedPreconditionError(f"TensorRT {self.version} made no plan of the network: {last}") from error


def find(*, rtx: bool = False) -> Builder:
    """Finds the builder.

    Args:
        rtx: Whether TensorRT for RTX is wanted, which needs no card.

    Raises:
        NotFoundError: The package is not installed: the message says what to do.
        FailedPreconditionError: It is, but there is no card to compile for.
    """
    for name in (RTX_PACKAGE,) if rtx else PACKAGES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if not rtx and not _DRIVER.exists():
            raise FailedPreconditionError(
                "TensorRT compiles a plan on the card that it is for, and this machine has no NVIDIA driver: build on "
                "a machine with the card of the tier"
            )
        return Builder(module, str(module.__version__), None if rtx else plugin_library())
    wanted = RTX_PACKAGE if rtx else PACKAGES[0]
    raise NotFoundError(
        f"a mining engine is compiled by TensorRT's builder, whose Python package {wanted} is not installed: build "
        "in an environment with the extra `tensorrt`, on a machine with the card of the tier"
    )


def plugin_library() -> Path | None:
    """The plugin library of this installation: in `plugins` beside the native library; None if it is not there.

    An engine that needs it gets a copy, which its contract's digests cover: a plan goes with the kernels that it was
    built with, wherever the suite is installed.
    """
    named = os.environ.get(_NATIVE_VARIABLE)
    native = Path(named) if named else Path(__file__).resolve().parents[2] / "build" / "native" / "libifab_engine.so"
    library = native.parent / _PLUGINS_FOLDER / plugins.LIBRARY
    return library if library.is_file() else None


def _logger(module: Any) -> Any:
    """A logger of this module that keeps the last warning or error; its base class is the module's own."""

    class Logger(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.last = ""

        def log(self, severity: Any, message: str) -> None:
            if severity <= module.ILogger.Severity.WARNING:
                self.last = " ".join(message.split())[:500]

    return Logger()
