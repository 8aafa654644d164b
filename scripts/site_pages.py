# SPDX-License-Identifier: Apache-2.0
"""A hook of mkdocs: pages that lie beside what they describe are pages of the site, too, and links lead to them."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "deploy/k8s/README.md": "kubernetes.md",
    "deploy/images/README.md": "images.md",
    "engines/tiers/README.md": "tiers.md",
}
"""Pages outside docs/, and their names on the site."""
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages, with links that are right where they are put."""
    for path, name in ELSEWHERE.items():
        text = _relinked((ROOT / path).read_text(), PurePosixPath(path).parent)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links of pages in docs/ to the pages that were added."""
    if page.file.src_uri in ELSEWHERE.values():
        return markdown
    return _relinked(markdown, PurePosixPath("docs") / PurePosixPath(page.file.src_uri).parent, leave=True)


def _relinked(markdown: str, folder: PurePosixPath, *, leave: bool = False) -> str:
    """Changes links of a page in `folder` of the repository; `leave` leaves those within docs/ as they are.

    What the site does not have is named and not linked.
    """

    def changed(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        path = _resolved(folder / target)
        if path in ELSEWHERE:
            return f"[{words}]({ELSEWHERE[path]}{anchor})"
        if path.startswith("docs/"):
            return link[0] if leave else f"[{words}]({path.removeprefix('docs/')}{anchor})"
        return f"{words} (`{path}`)"

    return _LINK.sub(changed, markdown)


def _resolved(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)
