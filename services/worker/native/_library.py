# SPDX-License-Identifier: Apache-2.0
"""Finds the native library, checks that it speaks this package's interface, and declares its functions."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from services.common.errors import FailedPreconditionError
from services.worker.native._layout import ABI_MAJOR, ABI_MINOR, STRUCT_SIZES, PollBuffersStruct, StatsStruct

LIBRARY_VARIABLE = "IFAB_ENGINE_LIBRARY"
"""Environment variable that names the library's file; absent or empty means the one of the checkout's build."""

LogFn = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_char_p)
"""`ifab_log_fn`."""

_STATUS = ctypes.c_int32
_HANDLE = ctypes.c_void_p
_TEXT_OUT = (ctypes.c_char_p, ctypes.c_size_t)
_DOCUMENT_OUT = (ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), *_TEXT_OUT)
_U32_OUT = ctypes.POINTER(ctypes.c_uint32)

_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "ifab_status_name": (ctypes.c_char_p, (_STATUS,)),
    "ifab_log_set": (None, (LogFn, ctypes.c_void_p, ctypes.c_int32)),
    "ifab_engine_inspect": (_STATUS, (ctypes.c_char_p, *_DOCUMENT_OUT)),
    "ifab_engine_runs_here": (_STATUS, (ctypes.c_char_p, *_TEXT_OUT)),
    "ifab_contract_check": (_STATUS, (ctypes.c_char_p, ctypes.c_size_t, *_DOCUMENT_OUT)),
    "ifab_engine_create": (_STATUS, (ctypes.c_char_p, ctypes.POINTER(_HANDLE), *_TEXT_OUT)),
    "ifab_engine_destroy": (None, (ctypes.POINTER(_HANDLE),)),
    "ifab_engine_describe": (_STATUS, (_HANDLE, *_DOCUMENT_OUT)),
    "ifab_engine_submit": (
        _STATUS,
        (_HANDLE, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
    ),
    "ifab_engine_poll": (
        _STATUS,
        (_HANDLE, ctypes.POINTER(PollBuffersStruct), _U32_OUT, ctypes.c_int32, *_TEXT_OUT),
    ),
    "ifab_engine_wake": (None, (_HANDLE,)),
    "ifab_engine_cancel": (_STATUS, (_HANDLE, ctypes.c_void_p, ctypes.c_uint32, _U32_OUT)),
    "ifab_engine_stats": (_STATUS, (_HANDLE, ctypes.POINTER(StatsStruct))),
}
"""Function -> (result, arguments). The two that are asked before anything is trusted are declared in `load`."""


def library_path() -> Path:
    """Where the library is looked for."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return Path(named)
    return Path(__file__).resolve().parents[3] / "build" / "native" / "libifab_engine.so"


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library, loaded and checked once a process.

    Raises:
        FailedPreconditionError: see `load`.
    """
    return load(library_path())


def library_version() -> str:
    """Returns the interface version of the library, such as `1.1`, loading it if need be.

    Raises:
        FailedPreconditionError: see `load`.
    """
    major, minor = _version(library())
    return f"{major}.{minor}"


def load(path: Path) -> ctypes.CDLL:
    """Loads the library of a file and declares its functions.

    Raises:
        FailedPreconditionError: there is no such file, it cannot be loaded, or it speaks another interface: the
            message has both version numbers, or both sizes of the struct that differs.
    """
    if not path.is_file():
        raise FailedPreconditionError(
            f"the native library is not at {path}: build it with `make native`, or name it in {LIBRARY_VARIABLE}"
        )
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise FailedPreconditionError(f"the native library at {path} cannot be loaded: {error}") from error
    try:
        _check(loaded, path)
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, list(arguments)
    except AttributeError as error:
        raise FailedPreconditionError(f"{path} is not the native library: {error}") from error
    return loaded


def _check(loaded: ctypes.CDLL, path: Path) -> None:
    major, minor = _version(loaded)
    if major != ABI_MAJOR or minor < ABI_MINOR:
        raise FailedPreconditionError(
            f"the native library at {path} has interface version {major}.{minor}; this worker needs "
            f"{ABI_MAJOR}.{ABI_MINOR} or a later {ABI_MAJOR}.x: build both from one checkout"
        )
    loaded.ifab_struct_size.restype = ctypes.c_size_t
    loaded.ifab_struct_size.argtypes = [ctypes.c_int32]
    for struct, (which, size) in STRUCT_SIZES.items():
        theirs = loaded.ifab_struct_size(which)
        if theirs != size:
            raise FailedPreconditionError(
                f"{struct} has {theirs} bytes in the native library at {path} and {size} in this worker: "
                "build both from one checkout"
            )


def _version(loaded: ctypes.CDLL) -> tuple[int, int]:
    loaded.ifab_abi_version.restype = None
    loaded.ifab_abi_version.argtypes = [_U32_OUT, _U32_OUT]
    major, minor = ctypes.c_uint32(), ctypes.c_uint32()
    loaded.ifab_abi_version(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value
