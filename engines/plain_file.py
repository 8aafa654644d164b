# SPDX-License-Identifier: Apache-2.0
"""Opens files that somebody else names: a pipe or a device in a file's place is an error, and nobody waits on it."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from io import BufferedReader
    from pathlib import Path


def open_plain(path: Path) -> BufferedReader:
    """Opens a regular file to be read.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    return os.fdopen(descriptor_of(path), "rb")


def descriptor_of(path: Path) -> int:
    """As `open_plain`, for those who read by place: the descriptor, which the caller closes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))
