# SPDX-License-Identifier: Apache-2.0
"""Contracts: their rules, read by the library and by the services, and the directories that they describe."""
