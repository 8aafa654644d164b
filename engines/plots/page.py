# SPDX-License-Identifier: Apache-2.0
"""One page of HTML with everything inside."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from engines.plots.svg import STYLE

if TYPE_CHECKING:
    from collections.abc import Sequence

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; color: #212529; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-size: 0.88rem; }
th, td { text-align: left; padding: 0.25rem 0.6rem; border-bottom: 1px solid #dee2e6; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.holds { color: #2b8a3e; } .fails { color: #c92a2a; } .muted { color: #6c757d; }
code { background: #f1f3f5; padding: 0.1rem 0.3rem; }
svg { width: 100%; height: auto; margin: 0.8rem 0; }
"""


class Page:
    """Collects parts in order; `html()` is the page."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """Begins a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str, *, kind: str = "") -> None:
        """Adds a paragraph; `kind` is `holds`, `fails`, `muted` or nothing."""
        self._parts.append(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")

    def command(self, line: str) -> None:
        """Adds a command line."""
        self._parts.append(f"<p><code>{escape(line)}</code></p>")

    def chart(self, svg: str) -> None:
        """Adds a chart."""
        self._parts.append(svg)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> None:
        """Adds a table; `numbers` says which columns are numbers."""
        marks = [' class="number"' if at in numbers else "" for at in range(len(columns))]
        head = "".join(f"<th{mark}>{escape(name)}</th>" for name, mark in zip(columns, marks, strict=True))
        body = "".join(
            "<tr>" + "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>"
            for row in rows
        )
        self._parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")

    def html(self) -> bytes:
        """The whole page, UTF-8."""
        title = escape(self._title)
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}{STYLE}</style></head>\n'
            f"<body><h1>{title}</h1>\n" + "\n".join(self._parts) + "\n</body></html>\n"
        ).encode()
