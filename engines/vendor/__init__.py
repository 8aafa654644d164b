# SPDX-License-Identifier: Apache-2.0
"""Engines that TensorRT-LLM 1.2.1's own tools make, and what they are told.

commands    the exact command lines, every flag with its reason
tools       finding the tools, asking them which flags they know, running them within a limit
checkpoint  what the quantised checkpoint must have before an engine is made of it
documents   `executor.json` and `contract.json` of what came out
build       from tier and checkpoint to a published engine directory
"""
