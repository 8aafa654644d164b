# SPDX-License-Identifier: Apache-2.0
"""Servers that generate text, all asked in the same way.

    target      what can be asked
    broker      our broker
    openai      OpenAI-compatible HTTP servers, over `http`
    kserve      KServe v2 gRPC servers; `kserve_messages` describes what goes over the wire

Errors of each become ours, so that rungs and probes count them alike.
"""
