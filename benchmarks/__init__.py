# SPDX-License-Identifier: Apache-2.0
"""Benchmarks, one module each: `make bench-NAME` runs `benchmarks.NAME` (a dash in NAME is an underscore here)."""
