# SPDX-License-Identifier: Apache-2.0
"""What the services share: settings, logs, telemetry, errors, gRPC plumbing, the contract. Knows no service."""
