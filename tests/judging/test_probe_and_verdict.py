# SPDX-License-Identifier: Apache-2.0
"""Guided decoding is held to its contract, and a verdict follows from evidence alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from engines import evidence
from engines.probe_guided.constraints import constraints
from engines.probe_guided.probing import ProbeResult
from engines.probe_guided.report import sentences
from engines.simulated import write_simulated_engine
from engines.verdict.judgement import CLOSE, KEEP, OPEN, judge
from engines.verdict.report import page
from services.common.contract import engine_digest
from services.common.errors import InvalidArgumentError
from services.common.evidence import digest_of
from tests.support import suite

if TYPE_CHECKING:
    from pathlib import Path


def test_checks_of_answers_are_strict() -> None:
    catalogue, nested, regex, grammar = constraints(3000)
    names = json.loads(catalogue.text)["enum"]
    assert len(set(names)) == 3000
    assert catalogue.keeps(json.dumps(names[7]))
    assert not catalogue.keeps('"Nobody 1"')
    assert catalogue.begins(json.dumps(names[7])[:5])
    assert not catalogue.begins('"zzz')
    good = {"order_1": "paid", "lines": [{"part": "nut", "count": 2, "tags": ["new"]}]}
    assert nested.keeps(json.dumps(good))
    wrong: list[Any] = [{**good, "more": 1}, {**good, "lines": []}, {**good, "order_1": "lost"}, [], 7]
    for each in wrong:
        assert not nested.keeps(json.dumps(each))
    line = {"part": "nut", "count": True, "tags": ["new"]}
    assert not nested.keeps(json.dumps({**good, "lines": [line]})), "a truth is no integer"
    assert regex.keeps("ABC-1234-de")
    assert not regex.keeps("ABC-123-de")
    assert grammar.keeps("12 + (3 * 4)")
    assert not grammar.keeps("12 + ")
    assert not grammar.keeps("012 + 1")


def result(**changes: object) -> ProbeResult:
    values = {"name": "n", "word": "regex", "claimed": True, "refused": "", "samples": 4, "kept": 4, "cut": 0}
    values |= {"broken": (), "kept_unguided": 0, "compile_s": 0.1, "first_s": 0.1, "per_token_s": 0.01}
    return ProbeResult(**{**values, "per_token_unguided_s": 0.01, **changes})  # type: ignore[arg-type]


def test_what_is_claimed_must_be_and_the_other_way_round() -> None:
    assert sentences([result(), result(claimed=False, refused="no")]) == []
    wrong = sentences([result(refused="no"), result(claimed=False), result(broken=("x",))])
    assert [name for name, _ in wrong] == ["n", "n", "n"]
    assert "the engine refuses it: no" in wrong[0][1]
    assert "does not list regex" in wrong[1][1]
    assert "1 of 4 answers do not keep it" in wrong[2][1]


@pytest.mark.e2e
@pytest.mark.timeout(450)
def test_an_engine_without_guides_claims_none(tmp_path: Path) -> None:
    write_simulated_engine(tmp_path / "engine")
    done = suite.run("engine", "probe-guided", str(tmp_path / "engine"), "--samples", "1", "--json", within_s=200)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["constraints"]
    assert [each["refused"] != "" for each in said] == [True] * 4
    assert all(each["holds"] for each in said)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_engine_keeps_every_constraint(tmp_path: Path) -> None:
    words = ["--samples", "4", "--no-evidence", "--json"]
    done = suite.run("engine", "probe-guided", str(suite.ENGINE), *words, within_s=800)
    said = json.loads(done.stdout)["constraints"]
    assert done.returncode == 0, said
    assert all(each["kept"] + each["cut"] == 4 for each in said)


def add(engine: Path, kind: str, outcome: str) -> None:
    found = [evidence.EvidenceFinding("blk.0.attn_q.weight", "it is transposed", f"ifab engine {kind} again")]
    evidence.write(
        engine,
        kind=kind,
        outcome=outcome,
        summary=f"the {kind} was made",
        command=f"ifab engine {kind} it",
        figures=[evidence.Figure("tensors", 3, "1")],
        findings=found if outcome == evidence.FAILS else [],
    )


def add_earlier(engine: Path, kind: str, outcome: str) -> None:
    """Adds a document that says that it is of last year."""
    known = set(evidence.folder(engine).iterdir())
    add(engine, kind, outcome)
    (path,) = set(evidence.folder(engine).glob("*.json")) - known
    document = json.loads(path.read_text())
    document["produced_by"]["time"] = "2025-01-01T00:00:00Z"
    document["digest"] = digest_of(document)
    path.write_text(json.dumps(document))


def test_verdicts_follow_from_evidence(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    write_simulated_engine(engine)
    digest = engine_digest(engine)
    found = judge(engine, digest)
    assert (found.outcome, found.missing) == (OPEN, ("audit", "comparison", "guided-probe", "ladder"))
    assert "no audit and no comparison" in found.sentence
    for kind in ("audit", "comparison", "guided-probe"):
        add(engine, kind, evidence.HOLDS)
    add(engine, "ladder", evidence.MEASURED)
    found = judge(engine, digest)
    assert found.outcome == KEEP
    assert [each.kind for each in found.counted] == ["audit", "comparison", "guided-probe", "ladder"]
    assert judge(engine, digest, required=["sweep"]).outcome == OPEN
    add_earlier(engine, "audit", evidence.FAILS)
    assert judge(engine, digest).outcome == KEEP, "the newest of a kind counts"


@pytest.mark.parametrize("required", [[], ["audit", "beauty"]])
def test_a_verdict_rests_on_kinds_that_something_makes(required: list[str], tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    write_simulated_engine(engine)
    with pytest.raises(InvalidArgumentError, match=r"required: is ('beauty'|empty); expected at least one of audit"):
        judge(engine, engine_digest(engine), required=required)


def test_a_finding_closes_the_way_and_is_told_with_its_command(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    write_simulated_engine(engine)
    add(engine, "audit", evidence.FAILS)
    found = judge(engine, engine_digest(engine))
    assert found.outcome == CLOSE, "whatever else is missing"
    assert ("blk.0.attn_q.weight", "it is transposed", "ifab engine audit again") in {
        (each.subject, each.statement, each.command) for each in found.grounds if each.against
    }
    html = page(found, "engine", "ifab engine verdict engine").decode()
    assert "close: the audit speaks against this engine." in html
    assert "ifab engine audit again" in html


def test_damaged_evidence_does_not_count_and_is_told(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    write_simulated_engine(engine)
    add(engine, "audit", evidence.HOLDS)
    path = next(evidence.folder(engine).glob("audit-*.json"))
    path.write_text(path.read_text().replace("was made", "was faked"))
    found = judge(engine, engine_digest(engine), required=["audit"])
    assert found.outcome == OPEN
    assert [each.path for each in found.flawed] == [path]
    assert "Does not count" in page(found, "engine", "x").decode()


def test_the_command_says_keep_or_close_by_its_exit_status(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    write_simulated_engine(engine)
    add(engine, "ladder", evidence.MEASURED)
    kept = suite.run("engine", "verdict", str(engine), "--required", "ladder", "--html", str(tmp_path / "v.html"))
    assert kept.returncode == 0, kept.stderr
    assert "keep: nothing speaks against this engine, by its ladder" in kept.stdout
    assert "ifab engine ladder it" in kept.stdout
    still = suite.run("engine", "verdict", str(engine), "--json")
    assert still.returncode == 1
    said = json.loads(still.stdout)
    assert said["verdict"] == "open"
    assert said["missing"] == ["audit", "comparison", "guided-probe"]
    assert judge(engine, engine_digest(engine), required=["ladder"]).outcome == KEEP, "verdicts do not count themselves"
