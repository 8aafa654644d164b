# SPDX-License-Identifier: Apache-2.0
"""Evidence: kept beside an engine and keyed by it, whole or not there, and of no weight once it was touched."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from engines import evidence, inspect
from engines.evidence import EvidenceFinding, Figure, Input
from engines.simulated import write_simulated_engine
from services.common import schema
from services.common.contract import engine_digest
from services.common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError, ResourceExhaustedError
from services.common.evidence import DOCUMENTS_MAX, digest_of, parse

if TYPE_CHECKING:
    from pathlib import Path

FINDING = EvidenceFinding("blk.0.attn_q.weight", "1,000 times too large", "ifab engine audit a b")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    directory = tmp_path / "engine"
    write_simulated_engine(directory)
    return directory


def write(engine: Path, **changes: Any) -> Path:
    said: dict[str, Any] = {
        "kind": "audit",
        "outcome": "holds",
        "summary": "all tensors are what the source says",
        "command": "ifab engine audit source.gguf engine --json",
        "figures": [Figure("tensors", 272, "1"), Figure("worst_ratio", 1.0078125, "1")],
        "inputs": [Input("source.gguf", "ab" * 32)],
        "attachments": {"report.html": b"<p>fine</p>"},
    }
    return evidence.write(engine, **(said | changes))


def test_a_document_says_what_it_was_told_and_the_engine_stays_what_it_was(engine: Path) -> None:
    before = engine_digest(engine)
    path = write(engine)
    assert path.parent == engine.with_name("engine.evidence")
    assert engine_digest(engine) == before
    assert inspect.verify(engine) == []
    read = evidence.read(path)
    assert path.name == f"audit-{read.digest[:16]}.json"
    assert (read.kind, read.outcome, read.engine_digest) == ("audit", "holds", before)
    assert read.engine_id == "simulated-test"
    assert read.produced_by.tool == "ifab engine audit"
    assert read.figures == (Figure("tensors", 272.0, "1"), Figure("worst_ratio", 1.0078125, "1"))
    assert read.inputs == (Input("source.gguf", "ab" * 32),)
    assert (path.parent / read.attachments[0].path).read_bytes() == b"<p>fine</p>"
    good, flawed = evidence.read_all(engine, before)
    assert (good, flawed) == ([read], [])


def test_other_readers_of_json_schema_accept_it_too(engine: Path) -> None:
    document = json.loads(write(engine, outcome="fails", findings=[FINDING]).read_bytes())
    jsonschema.validate(document, json.loads(schema.source("evidence")))


def test_documents_add_up_in_order_of_time(engine: Path) -> None:
    digest = engine_digest(engine)
    kinds = ["sweep", "audit", "ladder"]
    paths = [write(engine, kind=kind, attachments={"report.html": kind.encode()}) for kind in kinds]
    assert len({path.name for path in paths}) == 3
    good, _ = evidence.read_all(engine, digest)
    assert sorted(each.kind for each in good) == sorted(kinds)
    assert [each.produced_by.time for each in good] == sorted(each.produced_by.time for each in good)


def test_evidence_of_another_engine_is_passed_over(engine: Path) -> None:
    write(engine)
    shutil.rmtree(engine)
    write_simulated_engine(engine, slots=8)
    assert evidence.read_all(engine, engine_digest(engine)) == ([], [])


@pytest.mark.parametrize("member", ["outcome", "summary", "engine_digest", "figures", "produced_by"])
def test_a_document_that_was_touched_does_not_count(engine: Path, member: str) -> None:
    path = write(engine, outcome="fails", findings=[FINDING])
    document = json.loads(path.read_bytes())
    document[member] = {
        "outcome": "holds",
        "summary": "all is well",
        "engine_digest": "0" * 64,
        "figures": document["figures"][:1],
        "produced_by": document["produced_by"] | {"machine": "another"},
    }[member]
    path.write_text(json.dumps(document))
    good, flawed = evidence.read_all(engine, engine_digest(engine))
    assert good == []
    assert [each.kind for each in flawed] == ["audit"]
    assert f"{digest_of(document)}, the digest of the document" in flawed[0].why


def test_the_digest_is_of_the_values_and_not_of_the_spelling(engine: Path) -> None:
    path = write(engine)
    document = json.loads(path.read_bytes())
    spelled = json.dumps(dict(sorted(document.items())), separators=(", ", ": ")).replace("272.0", "2.72e2")
    assert "2.72e2" in spelled
    found, findings = parse(spelled.encode())
    assert findings == []
    assert found == evidence.read(path)


def test_a_missing_or_foreign_attachment_is_seen(engine: Path, tmp_path: Path) -> None:
    path = write(engine)
    report = next(each for each in path.parent.iterdir() if each.suffix == ".html")
    report.write_bytes(b"<p>FINE</p>")
    with pytest.raises(FailedPreconditionError, match=r"has the digest [0-9a-f]{64}, expected"):
        evidence.read(path)
    report.unlink()
    with pytest.raises(FailedPreconditionError, match="an attachment, cannot be read: No such file"):
        evidence.read(path)
    (tmp_path / "elsewhere").write_bytes(b"<p>fine</p>")
    report.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FailedPreconditionError, match="is not the attachment of 11 bytes"):
        evidence.read(path)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "An Audit"}, "kind: "),
        ({"outcome": "fails"}, 'findings: list of 0 items, expected at least one finding, since outcome is "fails"'),
        ({"outcome": "splendid"}, "outcome: "),
        ({"summary": "zwei\nZeilen"}, "summary: "),
        ({"figures": [Figure("rate", float("nan"), "1")]}, "a figure that is no number"),
        ({"figures": [Figure("rate", float("inf"), "1")]}, "a figure that is no number"),
        ({"inputs": [Input("source", "short")]}, r"inputs\[0\].sha256"),
        ({"attachments": {"../report.html": b""}}, "is no plain file name"),
        ({"attachments": {".report": b""}}, "is no plain file name"),
    ],
    ids=str,
)
def test_what_could_not_be_read_again_is_not_written(engine: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        write(engine, **changes)
    assert not engine.with_name("engine.evidence").exists()


def test_there_is_no_evidence_about_an_engine_that_is_not_whole(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such engine directory"):
        write(tmp_path / "nothing")
    (engine / "tokenizer.json").write_text("{}")
    with pytest.raises(FailedPreconditionError, match=r"files\[\d\].size_bytes"):
        write(engine)


def test_documents_have_a_bound(engine: Path) -> None:
    path = write(engine)
    for number in range(1, DOCUMENTS_MAX):
        (path.parent / f"audit-{number:016x}.json").write_text("{}")
    with pytest.raises(ResourceExhaustedError, match=f"{DOCUMENTS_MAX} documents lie in"):
        write(engine, kind="ladder")
    good, flawed = evidence.read_all(engine, engine_digest(engine))
    assert len(good) == 1
    assert len(flawed) == DOCUMENTS_MAX - 1
    (path.parent / "audit-ffffffffffffffff.json").write_text("{}")
    with pytest.raises(FailedPreconditionError, match=f"holds {DOCUMENTS_MAX + 1} documents, at most {DOCUMENTS_MAX}"):
        evidence.read_all(engine, engine_digest(engine))
