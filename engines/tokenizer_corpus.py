# SPDX-License-Identifier: Apache-2.0
"""Texts on which two tokenizers must agree: everything about text that tokenizers are known to stumble over.

All of it is made here, from a seed; the same texts come every time.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SEED: Final = 20261129
MIXTURES: Final = 4000
"""Texts of a build's corpus that are put together by chance."""

_SURROGATES = range(0xD800, 0xE000)
_PLANES: Final = (
    range(1, 0x32400),  # every plane that Unicode has filled
    range(0x3FFF0, 0x40010), range(0x7FFF0, 0x80010), range(0xBFFF0, 0xC0010),  # first bytes 0xF0 to 0xF3 meet
    range(0xE0000, 0xE0200), range(0xFFFF0, 0x100010), range(0x10FFF0, 0x110000),
)  # fmt: skip
_PER_TEXT = 64

_SPACES = [
    " ", "  ", "\t", "\n", "\r", "\r\n", "\u00a0", "\u2003", "\u2028", "\u3000", "\u200b", "\ufeff", "\x0b", "\x85",
]  # fmt: skip


def _listed(text: str) -> list[str]:
    return text.split()


_CONTRACTIONS = _listed("'s 't 're 've 'm 'll 'd 'S 'RE \u2019s ' '' 'x 'l 'r")
_NUMBERS = _listed(
    "0 7 42 007 3.14 1,024 -1 1e-9 0x1F 2026-11-29 12:34:56 1st % 100% $5 €1.000,00 v2.0.1-rc3 "
    "\u00bd \u00b2 \u2167 \u0663 \uff11\uff12 \u3007 \u136b \U0001d7d7 \u2460"
)
_WORDS = _listed(
    "the The THE quick naïve Straße façade Ångström o'clock don't CamelCase snake_case ﬁne İstanbul ǅ Zürich "
    "ΑΒΓ привет שלום مرحبا हिन्दी ไทย 中文 日本語 한국어 a\u0301 e\u0302\u0323 Z\u0351\u036b\u0343 \u1112\u1161\u11ab"
)
_SIGNS = _listed(
    "😀 👩\u200d👩\u200d👧 🇩🇪 ❤\ufe0f 🏴\U000e0067\U000e0062\U000e007f → … — « » „ “ ✓ \ufffd \ue000 \u202e \u0301 "
    ". , ! ?! ... ( ) [] {} < > <| |> </s> # ## --- === *** ``` // /* \\n @ && || != :: -> =>"
)
_CONTROLS = ["\x00", "\x04", "\x1d", "\x7f"]
_CODE = [
    "def f(x: int = 0) -> str:\n    return f'{x!r:>10}'  # note\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i] * 0x7f;\n}\r\n",
    "SELECT id, COUNT(*) FROM t WHERE a <> 'b''c' GROUP BY 1;\n",
    '{"key": [1, 2.5e-3, null, true], "text": "a\\u00e9\\n"}',
    "<div class=\"a b\">&amp;&nbsp;<br/></div><!-- c -->",
    "#include <vector>\nstd::vector<std::pair<int, char*>> v{{1, nullptr}};\n",
    "if [ -z \"$X\" ]; then\n  echo \"${Y:-none}\" | sed 's/a\\/b//g' >&2\nfi\n",
    "| a | b |\n|---|:-:|\n| 1 | `x` |\n\n* item\n    1. nested\n",
    "\\frac{\\partial f}{\\partial x} = \\sum_{i=1}^{n} x_i^2\n",
    "2026-11-29T12:34:56.789Z ERROR [main] x.y.Z - failed: 0xDEADBEEF\n\tat a.b(C.java:42)\n",
]  # fmt: skip


def texts(control: Sequence[str], *, seed: int = SEED, mixtures: int = MIXTURES) -> list[str]:
    """All texts of the corpus.

    Args:
        control: Texts of the control tokens.
        seed: For the mixtures.
        mixtures: How many texts are put together by chance.
    """
    rng = random.Random(seed)  # noqa: S311 -- the same texts every time, nothing secret
    planned = itertools.chain(code_points(), runs(), beside_control_tokens(control), _CODE, _WORDS)
    return [*planned, *_mixtures(control, rng, mixtures)]


def code_points() -> Iterator[str]:
    """Every code point that Unicode has filled, after a blank and before an ending that depends on what it is."""
    points = (chr(point) for plane in _PLANES for point in plane if point not in _SURROGATES)
    while chunk := list(itertools.islice(points, _PER_TEXT)):
        yield "".join(f"{char}'s  {char} " for char in chunk)


def runs() -> Iterator[str]:
    """Runs of blanks, digits, signs and letters, of every short length and some long ones."""
    for length in [*range(1, 34), 63, 64, 65, 200, 1000]:
        for one in (*_SPACES, "1", "a", "é", "=", "中", "😀", "'"):
            yield f"x{one * length}y"
        yield " " * length
        yield "\n" * length + " " * length + "1"
    for left, right in itertools.product(_SPACES, _SPACES):
        yield f"{left}{right}a{right}{left}1 {left}.{right}"


def beside_control_tokens(control: Sequence[str]) -> Iterator[str]:
    """Control tokens alone, in a row, inside of words, and texts that only begin like one."""
    for text in control:
        yield from (text, text * 3, f"a{text}b", f" {text} ", f"\n{text}\n", f"'{text}'s", f"1{text}2", text.upper())
        yield from (text[:-1], text[1:], f"<{text}>", f"{text[:-1]} {text[-1]}", f"{text[: len(text) // 2]}{text}")
    yield from ("".join(pair) for pair in itertools.product(control, repeat=2))


def _mixtures(control: Sequence[str], rng: random.Random, count: int) -> Iterator[str]:
    kinds = [_SPACES, _SPACES, _WORDS, _WORDS, _NUMBERS, _CONTRACTIONS, _SIGNS, _CONTROLS, _CODE, list(control)]
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 24)):
            if rng.random() < 0.15:
                point = rng.choice(rng.choice(_PLANES))
                parts.append(chr(point) if point not in _SURROGATES else "\ufffd")
            else:
                parts.append(rng.choice(rng.choice(kinds)))
        yield "".join(parts)
