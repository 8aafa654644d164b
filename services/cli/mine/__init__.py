# SPDX-License-Identifier: Apache-2.0
"""Hidden states in bulk: rows in, tensors in shard files out.

`index` remembers which row lies where, `shards` writes the files, `mining` runs rows until all are there.
"""
