# SPDX-License-Identifier: Apache-2.0
"""The `ifab` command: starts the suite on this machine and talks to one that runs anywhere."""
