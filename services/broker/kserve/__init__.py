# SPDX-License-Identifier: Apache-2.0
"""The KServe v2 protocol in front of the front door, for clients that people have already. See docs/kserve.md.

Nothing is decided here: a call becomes a `GenerationRequest`, goes the way that `Generate` goes, and its result becomes
tensors. What the protocol can say and the suite cannot do is refused by name.
"""
