# SPDX-License-Identifier: Apache-2.0
"""How fast the files of an audit can be read at all."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engines.audit.storage import TensorFile

_CHUNK_BYTES: Final = 4 << 20
_MOST_BYTES: Final = 1 << 29
_LEAST_BYTES: Final = 1 << 22
"""Below this a rate says nothing."""


def read_rate(files: Sequence[TensorFile]) -> float:
    """Bytes a second of a plain read from the start of the files, the page cache dropped where the system does so.

    Returns:
        The rate; 0 where the files are too small to tell.
    """
    left, read, started = _MOST_BYTES, 0, time.perf_counter()
    for descriptor in (each for file in files for each in file.descriptors):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        offset = 0
        while left > 0 and (data := os.pread(descriptor, _CHUNK_BYTES, offset)):
            offset += len(data)
            read += len(data)
            left -= len(data)
    return read / (time.perf_counter() - started) if read >= _LEAST_BYTES else 0.0
