# SPDX-License-Identifier: Apache-2.0
"""The suite: one package a service, and what they share in `common`."""
