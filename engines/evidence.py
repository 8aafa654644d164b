# SPDX-License-Identifier: Apache-2.0
"""Writes evidence about an engine; `services.common.evidence` says what evidence is, and reads it.

    write(
        Path("build/engines/smollm2"),
        kind="audit",
        outcome=HOLDS,
        summary="272 of 272 tensors are what the source says, at 4 bits",
        command="ifab engine audit source.gguf build/engines/smollm2",
        figures=[Figure("tensors", 272, "1")],
        inputs=[Input("source.gguf", sha256)],
        attachments={"report.html": html},
    )

Documents are only ever added. A later one of the same kind counts for more than an earlier one.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

from engines import inspect
from services.common.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError
from services.common.evidence import (
    DOCUMENTS_MAX,
    FAILS,
    HOLDS,
    MEASURED,
    Attachment,
    Evidence,
    EvidenceFinding,
    Figure,
    Input,
    ProducedBy,
    digest_of,
    file_name,
    folder,
    parse,
    read,
    read_all,
    to_document,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "FAILS",
    "HOLDS",
    "MEASURED",
    "Attachment",
    "Evidence",
    "EvidenceFinding",
    "Figure",
    "Input",
    "ProducedBy",
    "folder",
    "machine",
    "read",
    "read_all",
    "write",
]

_ATTACHED_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*([.][A-Za-z0-9]+)?")


def write(
    engine_directory: Path,
    *,
    kind: str,
    outcome: str,
    summary: str,
    command: str,
    figures: Iterable[Figure] = (),
    findings: Iterable[EvidenceFinding] = (),
    inputs: Iterable[Input] = (),
    attachments: Mapping[str, bytes] | None = None,
    machine_text: str | None = None,
) -> Path:
    """Adds a document to what lies beside an engine directory: whole or not at all.

    Args:
        engine_directory: The engine; it must hold what its contract says, or nothing can be known about it.
        kind: What was done, one word: the document's file name begins with it.
        outcome: `holds`, `fails` (then with findings) or `measured`.
        summary: One sentence, printable ASCII.
        command: The command line that repeats it; its first words up to an argument are the tool.
        figures: Numbers with names and units.
        findings: What was found, one by one, each with the command that repeats it.
        inputs: What else it rests on, by digest.
        attachments: Files to lie beside the document: plain name and content.
        machine_text: What it ran on; this machine if absent.

    Returns:
        Where the document is.

    Raises:
        NotFoundError: There is no such engine directory.
        FailedPreconditionError: The engine does not hold what its contract says, or nothing can be written there.
        InvalidArgumentError: The document would have findings: each is named.
        ResourceExhaustedError: DOCUMENTS_MAX documents lie there already.
    """
    engine = inspect.describe(engine_directory)
    attached = _named(attachments or {})
    document = Evidence(
        evidence_version=1,
        kind=kind,
        engine_id=engine.contract.engine_id,
        engine_digest=engine.engine_digest,
        outcome=outcome,
        summary=summary,
        produced_by=ProducedBy(
            tool=_tool(command),
            tool_version=importlib.metadata.version("inference-fabric"),
            command=command,
            machine=machine_text or machine(),
            time=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        ),
        inputs=tuple(inputs),
        figures=tuple(Figure(each.name, float(each.value), each.unit) for each in figures),
        findings=tuple(findings),
        attachments=tuple(
            Attachment(name, len(content), hashlib.sha256(content).hexdigest()) for name, content in attached.items()
        ),
        digest="",
    )
    document = dataclasses.replace(document, digest=digest_of(to_document(document)))
    try:
        text = json.dumps(to_document(document), indent=2, allow_nan=False).encode() + b"\n"
    except ValueError as error:
        raise InvalidArgumentError(f"evidence of kind {kind} holds a figure that is no number") from error
    if against := parse(text)[1]:
        raise InvalidArgumentError(f"evidence of kind {kind}: " + "; ".join(map(str, against)))
    return _publish(folder(engine_directory), file_name(kind, document.digest), text, attached)


def machine() -> str:
    """This machine in a few words: processor and the cores that this process may use."""
    model = platform.processor() or platform.machine()
    try:
        with Path("/proc/cpuinfo").open() as file:
            named = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        named = []
    text = f"{len(os.sched_getaffinity(0))} cores, {named[0] if named else model}"
    return re.sub(r"[^!-~]+", " ", text).strip()[:128]


def _tool(command: str) -> str:
    words = command.split()
    return " ".join(words[:3] if words[:2] == ["ifab", "engine"] else words[:1]) or "unknown"


def _named(attachments: Mapping[str, bytes]) -> dict[str, bytes]:
    """Gives each attachment a name by its content, so that documents never take each other's files."""
    named: dict[str, bytes] = {}
    for name, content in attachments.items():
        if not _ATTACHED_NAME.fullmatch(name):
            raise InvalidArgumentError(f"attachments: {name!r} is no plain file name of letters, digits and one dot")
        stem, dot, suffix = name.partition(".")
        named[f"{stem}-{hashlib.sha256(content).hexdigest()[:16]}{dot}{suffix}"] = content
    return named


def _publish(place: Path, name: str, text: bytes, attached: Mapping[str, bytes]) -> Path:
    try:
        place.mkdir(exist_ok=True)
        if sum(path.suffix == ".json" for path in place.iterdir()) >= DOCUMENTS_MAX:
            raise ResourceExhaustedError(f"{DOCUMENTS_MAX} documents lie in {place} already: move old ones away")
        for each, content in attached.items():
            _write(place / each, content)
        return _write(place / name, text)
    except OSError as error:
        raise FailedPreconditionError(f"evidence cannot be written to {place}: {error.strerror}") from error


def _write(path: Path, content: bytes) -> Path:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    return path
