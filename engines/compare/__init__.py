# SPDX-License-Identifier: Apache-2.0
"""The same prompts through two engines: how far apart are their outputs?

    generation    engines that generate: divergence of their distributions, top choice, first divergence of texts
    payloads      engines that carry hidden states: cosine of the last token's, layer by layer
    report        the page to look at, and the document beside the engine

Both engines are asked through the broker, so that any runtime can be compared with any other.
"""
