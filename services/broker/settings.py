# SPDX-License-Identifier: Apache-2.0
"""What a broker is told. Nothing about engines is among it: that comes from the contracts of accepted nodes."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator, model_validator

from services.broker.core.settings import CoreSettings
from services.broker.jobs.crash import CrashPoint
from services.broker.jobs.housekeeping import Keeping
from services.broker.jobs.runner import RunnerLimits
from services.broker.jobs.service import JobSettings
from services.broker.journal.url import carries_secret, host_in_the_clear, is_url
from services.common.security import TokenSources, TokenVerifier
from services.common.settings import PeerAddress, ServiceSettings

_CORE = CoreSettings()
"""Defaults of the core's figures; they are stated there."""


class BrokerSettings(ServiceSettings, env_prefix="IFAB_BROKER_"):
    """Settings of a broker process."""

    provisioner: PeerAddress
    """Where the provisioner listens."""
    broker_id: str = Field(default="", max_length=128)
    """Name of the broker in its workers' logs; the machine's host name if empty."""

    jwks_file: Path | None = None
    """Public keys of who issues tokens to clients, a JSON Web Key Set; read again when the file changes."""
    token_issuer: str = Field(default="", max_length=1024)
    """What `iss` of a token has to be; required with jwks_file."""
    token_audience: str = Field(default="", max_length=1024)
    """What `aud` of a token has to hold; required with jwks_file."""
    access_file: Path | None = None
    """Static keys of clients by digest, and quotas of tenants, TOML; read again when the file changes."""

    trace_row_ratio: float = Field(default=0.01, ge=0, le=1)
    """Share of bulk rows that are traced, where otlp_endpoint is set; rows that fail are traced all the same."""

    live_timeout_s: float = Field(default=3600.0, gt=0, le=86_400)
    """Longest time that Generate or GenerateStream may take, in seconds, whatever the client's deadline."""
    stream_prompt_tokens_max: PositiveInt = 256 * 1024 * 1024
    """Prompt tokens that one Exchange stream may have waiting or running before it is not read further."""
    stream_result_bytes_max: PositiveInt = 32 * 1024 * 1024
    """Results that the client of one Exchange stream has not taken, in bytes, before the stream stops."""
    stream_patience_s: float = Field(default=300.0, gt=0, le=86_400)
    """How long bulk rows of a stream wait at the door while the broker has room for none of them, in seconds."""
    streams_max: PositiveInt = 10_000
    """Exchange streams that may be open at the same time."""
    tokenizers_max: PositiveInt = 8
    """Tokenizers that are kept in memory."""
    tokenizer_fetch_s: float = Field(default=20.0, gt=0, le=600)
    """How long fetching an engine's tokenizer from its worker may take, in seconds."""
    tokenizer_threads: int = Field(default=1, ge=1, le=256)
    """Batches of long texts that are tokenized at the same time, each on as many cores as the machine has."""

    waiting_requests_max: PositiveInt = _CORE.waiting_requests_max
    """Requests that may be in flight, waiting ones included; more are refused at the door."""
    tenant_requests_max: NonNegativeInt = _CORE.tenant_requests_max
    """Requests of one tenant that may be in flight, waiting ones included; 0 for no limit."""
    waiting_bytes_max: PositiveInt = _CORE.waiting_bytes_max
    """Memory that requests in flight may take, in bytes."""
    holdings_bytes_max: PositiveInt = _CORE.holdings_bytes_max
    """Memory for what workers are believed to hold in their caches, in bytes."""
    bound_chains_max: PositiveInt = _CORE.bound_chains_max
    """Block chains that are counted exactly for the bound of one job, 8 bytes each; beyond them a sample is counted."""
    interactive_linger_s: float = Field(default=_CORE.interactive_linger_s, ge=0, le=1)
    """How long interactive work waits for siblings while other interactive work has come just before, in seconds."""
    bulk_linger_s: float = Field(default=_CORE.bulk_linger_s, ge=0, le=60)
    """How long the first bulk work of a job waits for siblings, in seconds."""
    lead_limit_s: PositiveFloat = _CORE.lead_limit_s
    """How long siblings wait for their leader's prompt to be computed before they go all the same, in seconds."""
    interactive_reserve: float = Field(default=_CORE.interactive_reserve, ge=0, lt=1)
    """Share of a worker's credit that bulk work leaves free while interactive work has come lately."""
    interactive_lately_s: float = Field(default=_CORE.interactive_lately_s, ge=0)
    """How long ago "lately" is there, in seconds."""
    ageing_s: PositiveFloat = _CORE.ageing_s
    """Waiting time that makes up for one priority, in seconds."""
    overdue_s: PositiveFloat = _CORE.overdue_s
    """Time after which a claimed group of requests goes behind the others, in seconds."""
    decode_weight: float = Field(default=_CORE.decode_weight, ge=0)
    """Prompt tokens that one generated token counts for when work is divided between workers."""
    join_factor: PositiveFloat = _CORE.join_factor
    """How many times its cost in recomputed tokens a cut of a group has to move."""
    quantum: PositiveInt = _CORE.quantum
    """Requests that are given out before it is looked anew whose turn it is."""
    tenant_weights: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Share of each tenant, by name; one that is not named has 1."""
    silence_limit_s: PositiveFloat = _CORE.silence_limit_s
    """How long a worker with work may send nothing at all before it counts as lost, in seconds."""
    nobody_limit_s: PositiveFloat = _CORE.nobody_limit_s
    """How long requests wait while no worker serves any of their engines before they fail, in seconds."""
    retry_first_s: PositiveFloat = _CORE.retry_first_s
    """Delay before lost work runs again, in seconds; doubles with each loss."""
    retry_most_s: PositiveFloat = _CORE.retry_most_s
    """Longest such delay, in seconds."""
    retry_share: float = Field(default=_CORE.retry_share, ge=0)
    """Attempts beyond the first that may be spent for each first one."""
    retry_burst: PositiveInt = _CORE.retry_burst
    """Attempts beyond the first that may be spent at once."""
    attempts_max: PositiveInt = _CORE.attempts_max
    """Attempts after which a request fails, whatever lost them."""

    cordon_file: Path | None = None
    """File that remembers which nodes are cordoned; absent, they are cordoned as long as the process lives."""

    journal: str = Field(default="", max_length=4096)
    """Where jobs are kept: path of a SQLite file, or a postgresql:// URL, without password, for several brokers.
    One of another machine names its sslmode. Empty: no jobs are served."""
    journal_synchronous: Literal["FULL", "NORMAL"] = "FULL"
    """What a commit of a SQLite journal outlives: FULL also a power cut, NORMAL the end of the process."""
    journal_bytes_max: NonNegativeInt = 0
    """Size at which a SQLite journal counts as full and jobs wait for room, in bytes; 0 leaves it to the disk."""
    payload_dir: str = Field(default="", max_length=4096)
    """Folder for payloads of jobs, shared by all brokers of one journal; beside a SQLite journal if empty."""
    job_frontier_rows: int = Field(default=16_384, ge=1, le=1_000_000)
    """Rows of jobs that are read from the journal and have no committed result yet."""
    job_lease_s: float = Field(default=15.0, ge=0.5, le=3600)
    """How long other brokers wait, after this one was last heard, before they take its rows over, in seconds."""
    job_drain_s: float = Field(default=5.0, ge=0, le=3600)
    """How long rows that run get to end when the broker goes away, in seconds; the rest runs again."""
    job_retention_s: float = Field(default=30 * 86_400.0, ge=0)
    """How long a job is kept once it has ended, in seconds; 0 for ever."""
    job_kept_bytes: NonNegativeInt = 0
    """Size of the journal beyond which ended jobs are deleted, the oldest first, in bytes; 0 for no limit."""
    tenant_jobs_max: NonNegativeInt = 1000
    """Jobs of a tenant that have not ended; 0 for no limit."""
    tenant_rows_max: NonNegativeInt = 0
    """Rows of a tenant, over all its jobs; 0 for no limit."""
    tenant_bytes_max: NonNegativeInt = 0
    """Rows and results of a tenant, in bytes; 0 for no limit."""
    job_crash_at: str = ""
    """For tests: the named point of `services.broker.jobs.crash` at which the process kills itself."""

    @field_validator("journal")
    @classmethod
    def _holds_no_secret(cls, where: str) -> str:
        if is_url(where) and carries_secret(where):
            raise ValueError("a URL without a password, which would be logged; PGPASSFILE or PGPASSWORD carries it")
        return where

    @field_validator("job_crash_at")
    @classmethod
    def _is_a_point(cls, point: str) -> str:
        CrashPoint(point)
        return point

    @model_validator(mode="after")
    def _speaks_to_no_database_in_the_clear(self) -> BrokerSettings:
        away = host_in_the_clear(self.journal, os.environ) if is_url(self.journal) else ""
        if away and "journal" not in self.allow_cleartext:
            raise ValueError(
                f"journal leads to {away}, and rows would travel there in the clear: say sslmode=verify-full and "
                f"sslrootcert in the URL, or name journal in allow_cleartext"
            )
        return self

    @model_validator(mode="after")
    def _says_whose_tokens(self) -> BrokerSettings:
        if self.jwks_file is not None and not (self.token_issuer and self.token_audience):
            raise ValueError(
                "jwks_file needs token_issuer and token_audience: a token that was meant for others would be taken"
            )
        return self

    def tokens(self) -> TokenVerifier | None:
        """What verifies clients' tokens; None where clients come without.

        Raises:
            StartError: a file cannot be used.
        """
        if self.jwks_file is None and self.access_file is None:
            return None
        return TokenVerifier(TokenSources(self.jwks_file, self.token_issuer, self.token_audience, self.access_file))

    def jobs(self) -> JobSettings:
        """The job service's part."""
        return JobSettings(
            journal=self.journal,
            synchronous=self.journal_synchronous,
            journal_bytes=self.journal_bytes_max,
            payload_dir=self.payload_dir,
            crash_at=self.job_crash_at,
            limits=RunnerLimits(self.job_frontier_rows, self.job_lease_s, self.job_drain_s),
            keeping=Keeping(
                retention_s=self.job_retention_s,
                kept_bytes=self.job_kept_bytes,
                tenant_jobs=self.tenant_jobs_max,
                tenant_rows=self.tenant_rows_max,
                tenant_bytes=self.tenant_bytes_max,
            ),
        )

    @property
    def broker_name(self) -> str:
        """The broker's name in force."""
        return self.broker_id or socket.gethostname()

    def core(self) -> CoreSettings:
        """The core's part."""
        return CoreSettings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(CoreSettings)})
