# SPDX-License-Identifier: Apache-2.0
"""Conventions of the tree: what every file has, what none may hold, how long things may be."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (".py", ".h", ".c", ".cpp", ".proto", ".sh")
LINES_MAX = 600


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


FILES = tracked()


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def named(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_sources_state_their_licence() -> None:
    sources = [path for path in FILES if path.suffix in SOURCES or text(path).startswith("#!")]
    assert {"scripts/libllama", "services/cli/main.py"} < set(named(sources))
    silent = [path for path in sources if "SPDX-License-Identifier: Apache-2.0" not in "".join(text(path)[:200])]
    assert named(silent) == []


def test_no_source_is_longer_than_one_idea() -> None:
    long = [path for path in FILES if path.suffix in SOURCES and text(path).count("\n") > LINES_MAX]
    assert named(long) == []


@pytest.mark.parametrize(("name", "lines"), [("README.md", 150), ("CONTRIBUTING.md", 100)])
def test_what_newcomers_read_is_short(name: str, lines: int) -> None:
    assert text(ROOT / name).count("\n") <= lines


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("the address of a registry", r"(?<!emit-)index-url|/simple(/|\s|$)|\b(pypi\.org|pythonhosted|proxy\.golang)"),
        ("a path of one machine", r"(?<![\w.<])/(home|root|work|Users)/[a-z]"),
        ("unfinished work", r"\b(TODO|FIXME|XXX)\b|raise NotImplementedError"),
        ("a patched piece of our own", r"mock\.patch\(|from unittest\.mock"),
        ("a child that is forked beside gRPC's threads", r"preexec_fn=|\bos\.fork\("),
    ],
)
def test_the_tree_holds_no(what: str, pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in FILES
        if path.suffix not in {".jsonl", ".lock"} and path != Path(__file__)
        for number, line in enumerate(text(path).splitlines(), start=1)
        if re.search(pattern, line)
    ]
    assert found == [], f"the tree holds {what}"


def test_python_modules_read_annotations_late() -> None:
    modules = [path for path in FILES if path.suffix == ".py" and "import" in text(path)]
    eager = [path for path in modules if "from __future__ import annotations" not in text(path)]
    assert named(eager) == []


def test_every_locked_package_has_its_digest_and_no_address() -> None:
    for lock in sorted((ROOT / "requirements").glob("*.lock")):
        content = text(lock)
        assert "://" not in content, lock
        entries = re.split(r"\n(?=[A-Za-z0-9])", re.sub(r"(?m)^ *#.*\n", "", content))
        assert all("--hash=sha256:" in entry for entry in entries if entry.strip()), lock


def test_the_lock_has_every_package_that_the_project_names() -> None:
    project = tomllib.loads(text(ROOT / "pyproject.toml"))
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    wanted += project["project"]["optional-dependencies"]["engines"]
    names = {re.split(r"[<>=\[;~! ]", each)[0].lower().replace("_", "-") for each in wanted}
    locked = set(re.findall(r"(?m)^([a-z0-9-]+)(?:\[[a-z,-]+\])?==", text(ROOT / "requirements" / "dev.lock")))
    assert names - locked == set()


def test_every_verb_that_documents_name_exists() -> None:
    targets = set(re.findall(r"(?m)^([a-z0-9%-]+):", text(ROOT / "Makefile")))
    benchmarks = {f"bench-{path.stem.replace('_', '-')}" for path in (ROOT / "benchmarks").glob("*.py")}
    documents = [path for path in FILES if path.suffix in {".md", ".proto"}]
    named_verbs = {verb for path in documents for verb in re.findall(r"`make ([a-z0-9-]+)", text(path))}
    named_verbs |= set(re.findall(r"(?m)^\$? ?make ([a-z0-9-]+)", text(ROOT / "README.md")))
    assert {"run", "test"} <= named_verbs
    assert named_verbs - targets - benchmarks - {"bench-"} == set()


def test_tests_that_documents_select_exist() -> None:
    documents = "".join(text(path) for path in FILES if path.suffix == ".md")
    ours = re.findall(r"pytest (tests/[\w/]+) -k (\w+)", documents)
    for folder, word in ours:
        names = "".join(f"{path.stem}\n" + text(path) for path in (ROOT / folder).glob("test_*.py"))
        assert re.search(rf"(?m)^test_\w*{word}|^(?:async )?def test_\w*{word}", names), (folder, word)
    native = re.findall(r"ctest [^`\n]*-R (\w+)", documents)
    suites = "".join(text(path) for path in (ROOT / "native" / "tests").glob("*.cpp"))
    assert [word for word in native if not re.search(rf"(?m)^TEST(_[FP])?\(\w*{word}", suites)] == []
    assert ours
    assert native


def test_every_verb_says_what_it_does() -> None:
    makefile = text(ROOT / "Makefile")
    targets = set(re.findall(r"(?m)^([a-z0-9%-]+):", makefile))
    described = set(re.findall(r"(?m)^([a-z0-9%-]+):.*## .+", makefile))
    assert targets == described


def test_files_that_documents_name_exist() -> None:
    named_paths = {
        (document.name, path)
        for document in FILES
        if document.suffix == ".md"
        for path in re.findall(
            r"`((?:services|native|engines|protos|benchmarks|scripts|tests|docs|examples)/[^`\s*<A-Z]*)`",
            text(document),
        )
    }
    assert len(named_paths) > 30
    # The page about the native half speaks from there.
    roots = {"native.md": ROOT / "native"}
    missing = {
        (name, path)
        for name, path in named_paths
        if not any((root / path).exists() for root in {ROOT, roots.get(name, ROOT)})
    }
    assert sorted(missing) == []
