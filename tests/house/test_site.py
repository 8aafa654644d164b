# SPDX-License-Identifier: Apache-2.0
"""The documents as one site: every link leads somewhere, nothing is fetched from elsewhere, and answers are found.

A newcomer has two ways to an answer: the site's search, and two clicks from the first page. Both have to lead there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
HITS = 5
"""Results that somebody in a hurry looks at."""


class Answer(NamedTuple):
    """A question, what a newcomer types into the search, and where the answer stands."""

    question: str
    search: str
    place: str
    words: str
    """What the page says there."""


ANSWERS = (
    Answer("How do I start it without a GPU?", "quick start", "index.html#quick-start", "make run"),
    Answer("What is the bound that reports speak of?", "bound fewest tokens", "concepts.html", "fewest prompt tokens"),
    Answer("Why was my node refused?", "node refused", "runbook.html#ifabricnoderefused", "ifab nodes"),
    Answer("My job's client was killed. What now?", "same command killed", "bulk.html", "goes on"),
    Answer("What does QUOTA_EXCEEDED mean?", "QUOTA_EXCEEDED", "errors.html", "as many requests a minute"),
    Answer(
        "An engine has stalled: what do I do?",
        "engine stalled",
        "runbook.html#ifabricenginestalled",
        "take stacks of the process",
    ),
    Answer("What do I name tritonclient's inputs?", "text_input", "kserve.html#tensors", "input_ids"),
    Answer("How long does the client wait to try again?", "retries RetryInfo", "clients.html#python", "never earlier"),
    Answer("How do I take a node out of service?", "drain node", "operators.html", "ifab nodes drain"),
    Answer("How are certificates renewed?", "certificates without restart", "security.html", "new connections"),
    Answer("How do I make certificates?", "make certificates", "questions.html", "openssl"),
    Answer("How do I rotate certificates?", "rotate certificates", "questions.html", "looked at once a second"),
    Answer("How do I run it on two machines?", "two machines", "questions.html", "--advertise HOST-B:7602"),
    Answer("Does it run on Ubuntu?", "ubuntu requirements", "questions.html", "x86-64"),
    Answer("Is a row run exactly once?", "exactly once", "questions.html", "Each row has exactly one result"),
    Answer("Where do traces go?", "opentelemetry jaeger", "questions.html", "otlp_endpoint"),
    Answer("How do I make an API key?", "api key", "questions.html", "ifab key NAME"),
    Answer("How do I revoke a key?", "revoke key", "questions.html", "refused within a second"),
    Answer("How large may a row be?", "maximum size row", "questions.html", "8 MiB"),
    Answer("How large may a message be?", "maximum message", "questions.html", "16 MiB"),
    Answer("Which engine do I pick for a card?", "which engine card", "questions.html", "ifab engine plan"),
    Answer("How do I scale out?", "scale workers", "questions.html", "replicas"),
    Answer("Which ports does it use?", "ports firewall", "questions.html", "7600"),
    Answer(
        "What environment variables are there?", "environment variable", "settings.html", "IFAB_BROKER_DRAIN_GRACE_S"
    ),
    Answer("How do I see debug logs?", "log level", "questions.html", "log_level debug"),
    Answer("What timeouts are there?", "timeout", "questions.html", "live_timeout_s"),
    Answer("What do probes ask?", "readiness", "questions.html", "grpc.health.v1.Health/Check"),
    Answer("Can I go back to the release before?", "roll back", "questions.html", "refuses a newer one"),
    Answer("How do I run failed rows again?", "failed rows again", "questions.html", "a job never changes"),
    Answer("Which secrets does an overlay want?", "secrets overlays expect", "kubernetes.html", "broker-tls"),
    Answer("How large are the images?", "images sizes", "images.html", "worker-cuda"),
    Answer("What is built for a 24 GB card?", "tiers 24 GB card", "tiers.html", "ada-24gb"),
    Answer("What happens when the disk is full?", "disk full", "questions.html", "nothing acknowledged is lost"),
)


class Page(HTMLParser):
    """Where a page links to, what it loads, the anchors that it has, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.anchors.update(value for value in (named.get("id"), named.get("name")) if value)
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        elif "src" in named:
            self.loads.append(named["src"])
        elif tag == "link" and named.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(named["href"])

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """Pages by their path."""
    return {
        str(path.relative_to(site)): Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"
    }


def test_every_link_leads_somewhere(site: Path, pages: dict[str, Page]) -> None:
    dead = []
    for name, page in pages.items():
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                dead.append(f"{name}: {link}")
                continue
            found = pages.get(str(target.resolve().relative_to(site.resolve())))
            if found is not None and parts.fragment and unquote(parts.fragment) not in found.anchors:
                dead.append(f"{name}: {link}")
    assert dead == []


def test_nothing_is_fetched_from_elsewhere(pages: dict[str, Page]) -> None:
    assert {load for page in pages.values() for load in page.loads if urlsplit(load).netloc} == set()


def test_the_first_page_leads_to_every_page(pages: dict[str, Page]) -> None:
    linked = {urlsplit(link).path for link in pages["index.html"].links}
    assert set(pages) - {"index.html"} <= linked


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.question)
def test_an_answer_is_found(answer: Answer, site: Path, pages: dict[str, Page]) -> None:
    page, _, _ = answer.place.partition("#")
    assert answer.words in " ".join(pages[page].text.split())
    hits = list(search(site, answer.search))[:HITS]
    assert any(hit.startswith(answer.place) for hit in hits), hits


def search(site: Path, words: str) -> Iterator[str]:
    """Ranks sections as the site's search does: every word begins one of theirs, and one in a title counts for more."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    boost, separator = index["config"]["fields"]["title"]["boost"], re.compile(index["config"]["separator"])
    wanted = [word.lower() for word in separator.split(words) if word]
    ranked = []
    for section in index["docs"]:
        title, text = (
            [word.lower() for word in separator.split(re.sub(r"<[^>]+>", " ", section[part])) if word]
            for part in ("title", "text")
        )
        counts = [
            sum(boost * each.startswith(word) for each in title) + sum(each.startswith(word) for each in text)
            for word in wanted
        ]
        if all(counts):
            # Long sections mention everything: what a word is worth falls with the length of what it stands in.
            ranked.append((-sum(counts) / (20 + len(text)), section["location"]))
    return (location for _, location in sorted(ranked))
