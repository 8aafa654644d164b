# SPDX-License-Identifier: Apache-2.0
"""Reading the contract of an engine directory; the counterpart of `native/src/directory.cpp`, and with digests."""

from __future__ import annotations

import hashlib
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from services.common import schema
from services.common.contract.findings import SCHEMA, check
from services.common.contract.wire import from_document
from services.common.errors import FailedPreconditionError, NotFoundError
from services.common.schema.document import MAX_BYTES, item_path, render, render_text

if TYPE_CHECKING:
    from ifabric.engine.v1 import contract_pb2
    from services.common.schema import Document, Finding

CONTRACT_FILE: Final = "contract.json"
"""Name of the contract in every engine directory."""
MAX_ENTRIES: Final = 4096
"""Files and folders that an engine directory may hold."""


def engine_digest(directory: Path) -> str:
    """SHA-256 of the bytes of `contract.json`, 64 lower-case hexadecimal digits.

    Raises:
        NotFoundError: There is no such directory, or no contract in it.
        FailedPreconditionError: The contract cannot be read.
    """
    return hashlib.sha256(_contract_text(directory)).hexdigest()


def read(directory: Path) -> tuple[contract_pb2.EngineContract, list[Finding]]:
    """Reads the contract of an engine directory and holds the files that lie there to it, digests included.

    Reads every file of the engine once, so that it takes as long as the disk needs. Nothing wrong is an error here.

    Returns:
        The contract as far as its wire form can carry it, and everything wrong that the wire form cannot show: unknown
        or mistyped fields, files that are missing, not listed, or not of their size and digest. `all_findings` of both
        is everything that is wrong.

    Raises:
        NotFoundError: There is no such directory, or no contract in it.
        FailedPreconditionError: The directory cannot be read, or holds more than MAX_ENTRIES entries.
    """
    text = _contract_text(directory)
    findings = schema.Findings()
    document = schema.read_document(text, findings)
    if document is not schema.ABSENT:
        schema.named(SCHEMA).check(document, findings)
        _compare_files(document, _list(directory), findings)
    contract = from_document(document)
    carried = set(check(contract))
    return contract, [finding for finding in findings.all if finding not in carried]


def _contract_text(directory: Path) -> bytes:
    if not directory.is_dir():
        raise NotFoundError(f"no such engine directory: {directory}")
    path = directory / CONTRACT_FILE
    root = Path(os.path.realpath(directory))
    if not os.path.lexists(path):
        raise NotFoundError(f"no {CONTRACT_FILE} in engine directory {directory}")
    if not path.is_file() or not Path(os.path.realpath(path)).is_relative_to(root):
        raise NotFoundError(f"no {CONTRACT_FILE} in engine directory {directory}: what is there is no file of its own")
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FailedPreconditionError(f"{path} cannot be read: {error.strerror}") from error


@dataclass(slots=True)
class _Listing:
    """What lies in an engine directory."""

    root: Path
    """Absolute, links resolved."""
    files: dict[str, int] = field(default_factory=dict)
    """Size in bytes of every regular file, by relative path."""
    strangers: dict[str, str] = field(default_factory=dict)
    """What lies there and is no regular file: what it is."""


def _list(directory: Path) -> _Listing:
    listing = _Listing(Path(os.path.realpath(directory)))
    entries = 0
    folders = [listing.root]
    try:
        while folders:
            with os.scandir(folders.pop()) as inside:
                found = list(itertools.islice(inside, MAX_ENTRIES + 1))
            entries += len(found)
            if entries > MAX_ENTRIES:
                raise FailedPreconditionError(f"engine directory {directory} holds more than {MAX_ENTRIES} entries")
            folders += [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]
            for entry in found:
                if not entry.is_dir(follow_symlinks=False):
                    _list_entry(entry, listing)
    except OSError as error:
        raise FailedPreconditionError(f"engine directory {directory} cannot be read: {error.strerror}") from error
    return listing


def _list_entry(entry: os.DirEntry[str], listing: _Listing) -> None:
    path = Path(entry.path)
    name = path.relative_to(listing.root).as_posix()
    if entry.is_symlink() and not (path.exists() and Path(os.path.realpath(path)).is_relative_to(listing.root)):
        listing.strangers[name] = "a link out of the directory"
    elif not entry.is_file():
        listing.strangers[name] = "no regular file"
    else:
        listing.files[name] = entry.stat().st_size


def _compare_files(document: Document, listing: _Listing, findings: schema.Findings) -> None:
    """Works on a document with findings too, as far as its list of files can be read: all findings come at once."""
    listed = {CONTRACT_FILE}
    files = document.get("files") if isinstance(document, dict) else None
    if not isinstance(files, list):
        return
    for index, entry in enumerate(files):
        path = entry.get("path") if isinstance(entry, dict) else None
        if isinstance(path, str):
            listed.add(path)
            _compare_file(entry, item_path("files", index), listing, findings)
    for name in sorted(listing.files.keys() - listed):
        _report_unlisted(render_text(name), findings)
    for name in sorted(listing.strangers.keys() - listed):
        _report_unlisted(f"{render_text(name)}, {listing.strangers[name]},", findings)


def _compare_file(entry: dict[str, Document], at: str, listing: _Listing, findings: schema.Findings) -> None:
    path, said_size, said_digest = entry["path"], entry.get("size_bytes"), entry.get("sha256")
    if path not in listing.files:
        found = listing.strangers.get(path, "missing")
        findings.add(f"{at}.path", f"{render_text(path)}, {found}", "file in the engine directory")
        return
    size = listing.files[path]
    if type(said_size) is int and said_size != size:
        findings.add(f"{at}.size_bytes", render(said_size), f"{size}, the size of the file")
    elif isinstance(said_digest, str):
        digest = _digest(listing.root / path)
        if said_digest != digest:
            findings.add(f"{at}.sha256", render_text(said_digest), f"{digest}, the digest of the file")


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise FailedPreconditionError(f"{path} cannot be read: {error.strerror}") from error


def _report_unlisted(what: str, findings: schema.Findings) -> None:
    findings.add("files", f"{what} beside the listed files", "entry for every file of the engine directory")
