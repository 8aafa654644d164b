# SPDX-License-Identifier: Apache-2.0
"""One page that keeps or closes the way that made an engine, on evidence alone.

    judgement    which evidence counts, and what follows from it
    report       the page, and the document beside the engine

Nothing is measured here: every finding names the command that repeats it.
"""
