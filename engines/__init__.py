# SPDX-License-Identifier: Apache-2.0
"""Engines: the rules of their documents, the tiers that they are built for, and the builders.

    schema/     rules of `contract.json` and of each backend's configuration; both halves of the suite read them
    tiers/      what an engine for one kind of card is built to be
    build       makes an engine of the small model for the embedded runtime; `cpu` has its documents
    publish     engine directories come whole or not at all
    inspect     engine directories, looked at from the outside
    tokenizer   `tokenizer.json` from a GGUF vocabulary; `tokenizer_proof` holds it to the engine on `tokenizer_corpus`
    llama_tool, gguf_model, sources   ways to libllama, to GGUF files, to pinned packages
    simulated   engines that compute nothing, for tests and benchmarks

Builders know `services.common` and no service. Packages that only they need are the extra `engines`.
"""
