# SPDX-License-Identifier: Apache-2.0
"""The journal's schema, as numbered steps that only go forward.

A step, once released, never changes. Types are spelled for PostgreSQL; SQLite takes them as they are but for the few
that `for_sqlite` respells. Keys are the only indexes that rows pay for while they come in.
"""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """One migration."""

    number: int
    meaning: str
    statements: tuple[str, ...]


STEPS = (
    Step(
        1,
        "jobs, their rows, order, groups and results; leases of brokers",
        (
            """CREATE TABLE jobs (
                number BIGSERIAL PRIMARY KEY, tenant TEXT NOT NULL, job_id TEXT, spec BYTEA NOT NULL,
                priority INTEGER NOT NULL, deadline DOUBLE PRECISION, state INTEGER NOT NULL,
                state_reason TEXT NOT NULL, row_count BIGINT NOT NULL, finished BIGINT NOT NULL,
                failed BIGINT NOT NULL, size BIGINT NOT NULL, engine_digest TEXT NOT NULL,
                created DOUBLE PRECISION NOT NULL, ended DOUBLE PRECISION, end_code INTEGER NOT NULL,
                prompt_tokens BIGINT NOT NULL, computed_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL,
                generated_tokens BIGINT NOT NULL, reattempts BIGINT NOT NULL,
                UNIQUE (tenant, job_id))""",
            """CREATE TABLE rows_in (
                job BIGINT NOT NULL, row_number BIGINT NOT NULL, row_id BYTEA NOT NULL, body BYTEA NOT NULL,
                PRIMARY KEY (job, row_number))""",
            """CREATE TABLE row_keys (
                job BIGINT NOT NULL, row_number BIGINT NOT NULL, size BIGINT NOT NULL, sort_key BYTEA NOT NULL,
                PRIMARY KEY (job, row_number))""",
            """CREATE TABLE row_order (
                job BIGINT NOT NULL, place BIGINT NOT NULL, row_number BIGINT NOT NULL,
                PRIMARY KEY (job, place))""",
            """CREATE TABLE row_groups (
                job BIGINT NOT NULL, number BIGINT NOT NULL, first_place BIGINT NOT NULL, last_place BIGINT NOT NULL,
                owner TEXT NOT NULL,
                PRIMARY KEY (job, number))""",
            """CREATE TABLE results (
                job BIGINT NOT NULL, row_number BIGINT NOT NULL, body BYTEA NOT NULL,
                PRIMARY KEY (job, row_number))""",
            """CREATE TABLE brokers (
                owner TEXT PRIMARY KEY, lease_until DOUBLE PRECISION NOT NULL)""",
        ),
    ),
    Step(
        2,
        "payloads beside results, what each node did, the bound of a job",
        (
            "ALTER TABLE results ADD COLUMN shard TEXT NOT NULL DEFAULT ''",
            "ALTER TABLE results ADD COLUMN shard_offset BIGINT NOT NULL DEFAULT 0",
            "ALTER TABLE results ADD COLUMN shard_size BIGINT NOT NULL DEFAULT 0",
            "ALTER TABLE results ADD COLUMN crc32 BIGINT NOT NULL DEFAULT 0",
            "ALTER TABLE jobs ADD COLUMN bound_tokens BIGINT NOT NULL DEFAULT 0",
            """CREATE TABLE node_shares (
                job BIGINT NOT NULL, node_id TEXT NOT NULL, row_count BIGINT NOT NULL,
                computed_tokens BIGINT NOT NULL, generated_tokens BIGINT NOT NULL,
                PRIMARY KEY (job, node_id))""",
            "CREATE INDEX jobs_by_state ON jobs (state, number)",
        ),
    ),
    Step(
        3,
        "the bound of a job, group by group; -1 is what cannot be known of what was there before",
        (
            "ALTER TABLE row_groups ADD COLUMN reach BIGINT NOT NULL DEFAULT -1",
            "ALTER TABLE row_groups ADD COLUMN counted INTEGER NOT NULL DEFAULT 0",
            """CREATE TABLE bound_chains (
                job BIGINT NOT NULL, chain BIGINT NOT NULL,
                PRIMARY KEY (job, chain))""",
            "UPDATE jobs SET bound_tokens = -1 WHERE state IN (2, 3)",
        ),
    ),
    Step(
        4,
        "what each stretch of work on a job has cost beyond tokens",
        (
            """CREATE TABLE job_costs (
                job BIGINT NOT NULL, stretch TEXT NOT NULL, body BYTEA NOT NULL,
                PRIMARY KEY (job, stretch))""",
        ),
    ),
)
VERSION = STEPS[-1].number
"""What this broker reads and writes."""


def for_sqlite(statement: str) -> str:
    """Respells a statement for SQLite.

    Tables that are keyed by job and row are kept in that order, so that a range of rows is a range of pages.
    """
    respelled = statement.replace("BIGSERIAL PRIMARY KEY", "INTEGER PRIMARY KEY AUTOINCREMENT")
    if "PRIMARY KEY (job" in respelled:
        respelled += " WITHOUT ROWID"
    return respelled
