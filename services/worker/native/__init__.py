# SPDX-License-Identifier: Apache-2.0
"""The Python side of the C interface (`native/include/ifab/engine.h`), and the only package that uses ctypes.

    _layout.py    structs of the interface as numpy dtypes and ctypes structures
    _library.py   finds the library, checks that it is the one this package was written for, declares its functions
    _errors.py    status numbers of the interface -> errors of the suite
    _logs.py      log lines of the library -> a function of ours
    values.py     what goes in and comes out: options, requests, descriptions, statistics
    engine.py     one loaded engine: create, describe, submit, poll, cancel, stats, close

A call that waits in C holds no GIL: ctypes releases it around every foreign function of a `CDLL`.
"""

from __future__ import annotations

from services.worker.native._errors import native_error
from services.worker.native._library import LIBRARY_VARIABLE, library_path, library_version
from services.worker.native._logs import forward_logs
from services.worker.native.engine import Engine, PollBuffers, check_contract, check_machine, inspect
from services.worker.native.values import (
    EngineDescription,
    EngineFinding,
    EventKind,
    GuideKind,
    Inspection,
    Options,
    Request,
    Stats,
)

__all__ = [
    "LIBRARY_VARIABLE",
    "Engine",
    "EngineDescription",
    "EngineFinding",
    "EventKind",
    "GuideKind",
    "Inspection",
    "Options",
    "PollBuffers",
    "Request",
    "Stats",
    "check_contract",
    "check_machine",
    "forward_logs",
    "inspect",
    "library_path",
    "library_version",
    "native_error",
]
