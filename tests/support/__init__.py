# SPDX-License-Identifier: Apache-2.0
"""What tests of several parts share: waiting with a deadline, service processes, servers on loopback, log lines."""
