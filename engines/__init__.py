# SPDX-License-Identifier: Apache-2.0
"""Engines: the rules of their documents, the tiers that they are built for, and the builders.

    schema/     rules of `contract.json` and of each backend's configuration; both halves of the suite read them
    tiers/      what an engine for one kind of card is built to be
    tier        tiers of the embedded runtime, and `card_tier` those of cards; `tables` reads such files strictly
    planner     memory of an engine as a sum, and what follows from it: slots, the cache's share
    model_config, checkpoint   a model's figures, and its tensors in safetensors files
    build       makes an engine of the small model for the embedded runtime; `cpu` has its documents
    graph/, mining/   our own network, interpreted or compiled, and engines of it for the raw TensorRT runtime
    vendor/     engines that TensorRT-LLM's own tools make
    evidence    what was found out about an engine, beside it
    publish     engine directories come whole or not at all
    inspect     engine directories, looked at from the outside
    tokenizer   `tokenizer.json` from a GGUF vocabulary; `tokenizer_proof` holds it to the engine on `tokenizer_corpus`
    llama_tool, gguf_model, sources   ways to libllama, to GGUF files, to pinned packages
    simulated   engines that compute nothing, for tests and benchmarks
    audit, compare, probe_guided, ladder, sweep, verdict
                what judges engines (`docs/judging.md`); targets are the servers that it asks, plots what it draws

Builders know `services.common` and no service. Packages that only they need are the extra `engines`.
"""
