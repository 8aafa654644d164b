# SPDX-License-Identifier: Apache-2.0
"""The broker: `frontdoor` speaks with clients, `core` with workers, `work` is the seam between them."""
