# SPDX-License-Identifier: Apache-2.0
"""Network definitions as plain data: built once, lowered to a vendor's builder, or interpreted in NumPy.

`ir.Graph` records operations; each is exactly one layer call of TensorRT 10.6's network API, so that what
`numpy_interpreter` checks without a GPU is what `tensorrt_lowering` hands to the builder.
"""
