# SPDX-License-Identifier: Apache-2.0
"""Conversion fidelity: are converted weights what their source says, tensor by tensor?

    conversion         the audit: pairs, verdicts, findings
    model, view        the llama family's weights by role, however a file lays them out
    storage            tensors in files, a few rows at a time; gguf_file, safetensors_file open them
    measure, limits    how far values are apart, and how far a number format explains
    diagnosis, scales  why a tensor fails; scales that have no counterpart
    report             the page to look at, and the document beside the engine

`docs/judging.md` says what an audit can see, and what it cannot.
"""
