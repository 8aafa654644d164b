# SPDX-License-Identifier: Apache-2.0
"""Pages that can be looked at anywhere: one file each, with plots as SVG inside and nothing fetched from elsewhere."""
