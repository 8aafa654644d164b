# SPDX-License-Identifier: Apache-2.0
"""What is generated under a guide and ended by STOP parses and validates, by the judgement of other libraries.

The tiny engine's weights are random, so that nearly every token that it would choose is one that the guide forbids.
"""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING

import jsonschema

from services.common.errors import InvalidArgumentError, UnimplementedError
from services.worker.native import GuideKind
from tests.llama import made
from tests.llama.generated import Ended, Generator, Guided

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_TOKENS = 120


def check(generator: Generator, guides: Sequence[Guided], valid: Callable[[Guided, str], None]) -> None:
    """Runs the guides; every text that ended by STOP has to be valid, and most have to end so."""
    ended = generator.run(guides)
    for guide, end in zip(guides, ended, strict=True):
        assert end.refusal is None, f"{guide}: {end.refusal}"
        assert not end.failure, f"{guide}: {end.failure}"
        if end.by_stop:
            valid(guide, end.text)
    assert sum(end.by_stop for end in ended) > 0.6 * len(ended)


def valid_json(guide: Guided, text: str) -> None:
    """Raises where a text is not valid under the schema that guided it."""
    schema = json.loads(guide.text)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def matching(guide: Guided, text: str) -> None:
    """Raises where a text does not match the expression that guided it."""
    assert re.fullmatch(guide.text, text, re.ASCII), f"{guide.text!r} does not match {text!r}"


def schemas(seed: int, count: int) -> list[Guided]:
    """Guides of random schemas."""
    chance = random.Random(seed)
    return [
        Guided(
            GuideKind.JSON_SCHEMA, json.dumps(made.schema(chance), ensure_ascii=chance.random() < 0.5), n, MAX_TOKENS
        )
        for n in range(count)
    ]


def expressions(seed: int, count: int) -> list[Guided]:
    """Guides of random regular expressions."""
    chance = random.Random(seed)
    return [Guided(GuideKind.REGEX, made.regex(chance), n, MAX_TOKENS) for n in range(count)]


def test_generated_json_is_valid_under_its_schema(generator: Generator) -> None:
    check(generator, schemas(1, 200), valid_json)


def test_generated_text_matches_its_expression(generator: Generator) -> None:
    check(generator, expressions(1, 200), matching)


def test_a_bad_guide_is_refused_at_submit_with_its_reason(generator: Generator) -> None:
    guides = [
        Guided(GuideKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', 0, 8),
        Guided(GuideKind.JSON_SCHEMA, '{"type": "objet"}', 0, 8),
        Guided(GuideKind.REGEX, r"(?=a)b", 0, 8),
        Guided(GuideKind.GRAMMAR, "root ::= missing", 0, 8),
        Guided(GuideKind.REGEX, "yes|no", 0, 8),
    ]
    refused: list[Ended] = generator.run(guides)
    expected = [
        (UnimplementedError, "uniqueItems"),
        (InvalidArgumentError, "objet"),
        (UnimplementedError, "look-around"),
        (InvalidArgumentError, "missing"),
    ]
    for end, (error, part) in zip(refused, expected, strict=False):
        assert isinstance(end.refusal, error)
        assert part in str(end.refusal)
    assert refused[-1].text in ("yes", "no"), "its neighbours are none of its business"
