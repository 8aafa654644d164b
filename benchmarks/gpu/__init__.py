# SPDX-License-Identifier: Apache-2.0
"""Measurements on a card."""
