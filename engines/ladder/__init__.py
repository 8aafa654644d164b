# SPDX-License-Identifier: Apache-2.0
"""Throughput at rising concurrency: of our broker, or of a foreign server.

    plan        what is measured, and when it ends early
    climbing    the measuring
    rung        what one rung was
    company     clients of another engine that works meanwhile
    workload    prompts where nobody brings any
    report      table, page, and the document beside the engine

Every wait has a limit, and what is in flight at the end of a rung is waited for or cancelled before the next one.
"""
