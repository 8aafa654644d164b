# SPDX-License-Identifier: Apache-2.0
"""Which settings of an engine are worth how much, on this machine and this work.

    settings     what of an engine can be set, and the values that are tried
    variants     the engine directory with other settings, and their contract
    searching    one lever after the other, the step's token budget first, until the curve is flat
    journal      what was measured already
    report       table, page, the contract that is proposed, and the document beside the engine

What runs an engine and takes the time is the caller's: a suite, or the library itself.
"""
