# SPDX-License-Identifier: Apache-2.0
"""What tests of several parts share: waiting with a deadline, real service processes, servers on loopback."""
