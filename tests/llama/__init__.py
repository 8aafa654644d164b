# SPDX-License-Identifier: Apache-2.0
"""The llama backend behind the C interface, judged by other libraries."""
