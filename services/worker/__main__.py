# SPDX-License-Identifier: Apache-2.0
"""`python -m services.worker`."""

from __future__ import annotations

import os
import sys
import threading

from services.common import process
from services.worker.engine_host import THREAD_NAME
from services.worker.main import serve
from services.worker.settings import WorkerSettings

if __name__ == "__main__":
    status = process.run(WorkerSettings, serve)
    if any(thread.name == THREAD_NAME for thread in threading.enumerate()):
        # The engine still loads, or is stuck: the interpreter must not take its memory away under it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)
