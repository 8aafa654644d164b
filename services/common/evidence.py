# SPDX-License-Identifier: Apache-2.0
"""Evidence about engines: what was measured, compared or judged, in documents that lie beside an engine directory.

    build/engines/smollm2/                     the engine; its contract never changes
    build/engines/smollm2.evidence/            documents about it, and what is attached to them
        audit-3f09c1d2a4b55e17.json            KIND-DIGEST.json
        report-a81c….html

A document is keyed by the digest of the engine that it speaks of, so that it never speaks of another one, and carries
the SHA-256 of itself, of what it rests on and of what is attached. The digest of a document is taken over its JSON form
without the member `digest`, keys sorted, no spaces, ASCII only; it shows damage and change, not who wrote it.
`engines/schema/evidence.schema.json` has the rules. Services read such documents; `engines.evidence` writes them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.common import schema
from services.common.errors import FailedPreconditionError, NotFoundError
from services.common.schema.document import MAX_BYTES, render_text

SCHEMA: Final = "evidence"
"""Name of the schema of evidence."""
DOCUMENTS_MAX: Final = 256
"""Documents that may lie beside one engine."""
HOLDS: Final = "holds"
FAILS: Final = "fails"
MEASURED: Final = "measured"
"""The outcomes: a check that holds, one that fails, and figures without a verdict."""

_SUFFIX = ".evidence"
_STEM_DIGITS = 16


@dataclass(frozen=True, slots=True)
class ProducedBy:
    """Who found out, and how to find out again."""

    tool: str
    """Such as `ifab engine audit`."""
    tool_version: str
    command: str
    """The command line that repeats it."""
    machine: str
    """What it ran on, such as `2 cores, AMD EPYC`."""
    time: str
    """When it ended, UTC, `YYYY-MM-DDThh:mm:ssZ`."""


@dataclass(frozen=True, slots=True)
class Input:
    """Something else that the evidence rests on, such as the source checkpoint of an audit."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One number."""

    name: str
    """Such as `rungs[3].tokens_per_s`."""
    value: float
    unit: str
    """`1` for a ratio or a count."""


@dataclass(frozen=True, slots=True)
class EvidenceFinding:
    """One thing found, for people."""

    subject: str
    """What it is about, such as a tensor's name."""
    statement: str
    command: str
    """The command line that repeats this finding."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file beside the document: a report, a table, a plot."""

    path: str
    """Name in the folder of the document."""
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """One document without findings against it."""

    evidence_version: int
    kind: str
    """What was done: `audit`, `comparison`, `sweep`, `ladder`, `guided-probe`, `verdict`, …"""
    engine_id: str
    engine_digest: str
    """SHA-256 of the contract of the engine that it speaks of."""
    outcome: str
    """`holds`, `fails` or `measured`."""
    summary: str
    """One sentence."""
    produced_by: ProducedBy
    inputs: tuple[Input, ...]
    figures: tuple[Figure, ...]
    findings: tuple[EvidenceFinding, ...]
    attachments: tuple[Attachment, ...]
    digest: str
    """SHA-256 of the document without this member."""


@dataclass(frozen=True, slots=True)
class Flawed:
    """A document that does not count."""

    path: Path
    kind: str
    """As its file name says."""
    why: str
    """One line."""


def folder(engine_directory: Path) -> Path:
    """Where the evidence about an engine directory lies: beside it."""
    resolved = Path(os.path.abspath(engine_directory))
    return resolved.with_name(resolved.name + _SUFFIX)


def file_name(kind: str, digest: str) -> str:
    """The name of a document."""
    return f"{kind}-{digest[:_STEM_DIGITS]}.json"


def digest_of(document: dict[str, Any]) -> str:
    """SHA-256 of a document in its canonical form; the member `digest` is left out."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def to_document(evidence: Evidence) -> dict[str, Any]:
    """The plain form of evidence."""
    return dataclasses.asdict(evidence)


def parse(text: bytes) -> tuple[Evidence | None, list[schema.Finding]]:
    """Reads one document from its text; None where there are findings, its own digest included."""
    document, findings = schema.check_text(SCHEMA, text)
    if findings or not isinstance(document, dict):
        return None, findings
    figures = [figure | {"value": float(figure["value"])} for figure in document["figures"]]
    document |= {"figures": figures}
    evidence = Evidence(
        **{
            **document,
            "produced_by": ProducedBy(**document["produced_by"]),
            "inputs": tuple(Input(**each) for each in document["inputs"]),
            "figures": tuple(Figure(**each) for each in figures),
            "findings": tuple(EvidenceFinding(**each) for each in document["findings"]),
            "attachments": tuple(Attachment(**each) for each in document["attachments"]),
        }
    )
    if (digest := digest_of(document)) != evidence.digest:
        return None, [schema.Finding("digest", render_text(evidence.digest), f"{digest}, the digest of the document")]
    return evidence, []


def read(path: Path) -> Evidence:
    """Reads one document and holds what is attached to it.

    Raises:
        NotFoundError: There is no such file.
        FailedPreconditionError: It cannot be read, has findings, or an attachment is missing or another than it says.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise NotFoundError(f"no such evidence: {path}") from error
    except OSError as error:
        raise FailedPreconditionError(f"{path} cannot be read: {error.strerror}") from error
    evidence, findings = parse(text)
    if evidence is None:
        raise FailedPreconditionError(f"{path}: " + "; ".join(map(str, findings)))
    for attachment in evidence.attachments:
        _check_attachment(path.with_name(attachment.path), attachment)
    return evidence


def read_all(engine_directory: Path, engine_digest: str) -> tuple[list[Evidence], list[Flawed]]:
    """Reads everything that lies beside an engine directory and speaks of this engine.

    Evidence about another engine, such as the one that lay there before, is passed over: it is not wrong.

    Returns:
        Evidence in order of time, oldest first, and what does not count, with the reason.

    Raises:
        FailedPreconditionError: The folder cannot be read, or holds more than DOCUMENTS_MAX documents.
    """
    place = folder(engine_directory)
    if not place.is_dir():
        return [], []
    try:
        paths = sorted(path for path in place.iterdir() if path.suffix == ".json" and not path.name.startswith("."))
    except OSError as error:
        raise FailedPreconditionError(f"{place} cannot be read: {error.strerror}") from error
    if len(paths) > DOCUMENTS_MAX:
        raise FailedPreconditionError(f"{place} holds {len(paths)} documents, at most {DOCUMENTS_MAX} are read")
    good: list[Evidence] = []
    flawed: list[Flawed] = []
    for path in paths:
        try:
            evidence = read(path)
        except (FailedPreconditionError, NotFoundError) as error:
            flawed.append(Flawed(path, path.stem.rpartition("-")[0], error.message))
            continue
        if evidence.engine_digest == engine_digest:
            good.append(evidence)
    return sorted(good, key=lambda evidence: (evidence.produced_by.time, evidence.digest)), flawed


def _check_attachment(path: Path, said: Attachment) -> None:
    try:
        with path.open("rb") as file:
            if path.is_symlink() or os.fstat(file.fileno()).st_size != said.size_bytes:
                raise FailedPreconditionError(f"{path} is not the attachment of {said.size_bytes} bytes")
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FailedPreconditionError(f"{path}, an attachment, cannot be read: {error.strerror}") from error
    if digest != said.sha256:
        raise FailedPreconditionError(f"{path} has the digest {digest}, expected {said.sha256} of the attachment")
