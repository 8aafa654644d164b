# SPDX-License-Identifier: Apache-2.0
"""Engines, fleets and dispatch policies in virtual time, for benchmarks of what runs next and where."""
