# SPDX-License-Identifier: Apache-2.0
"""Does an engine's guided decoding take real constraints, keep them on every sample, and at what cost?

    constraints    a catalogue of thousands of names, a nested schema, a regular expression, a grammar
    probing        the asking and timing
    report         the page to look at, and the document beside the engine

What an answer must be is checked here in plain Python, never by the engine's own words.
"""
