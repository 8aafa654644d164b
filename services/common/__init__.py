# SPDX-License-Identifier: Apache-2.0
"""What the services share: settings, logs, telemetry, errors, gRPC plumbing, the contract. Knows no service."""

from __future__ import annotations

import os

# gRPC's C core logs to stderr in a form of its own, beside our lines and our one-sentence errors; what matters of it
# reaches us as errors of calls. It reads this variable once, when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
