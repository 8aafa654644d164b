# SPDX-License-Identifier: Apache-2.0
"""What is measured of the embedded runtime on cards, a module each: `measure(context)` returns the figures."""
