# SPDX-License-Identifier: Apache-2.0
"""Puts the one engine that was asked for where a worker will look for it: what runs before a worker in its pod.

    python -m services.worker.placing SOURCE TARGET --digest DIGEST

An image, a share or a download brings SOURCE; none of them is trusted to bring what was meant. DIGEST is the engine's,
the SHA-256 of its `contract.json`, and the contract lists the digest of every other file. Where SOURCE and TARGET are
the same folder it is verified where it lies. What is wrong with the contract itself does not stop it: the provisioner
refuses such an engine, where operators look.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from services.common.contract import engine_digest, read
from services.common.errors import FabricError, FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Sequence

_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


def place(source: Path, target: Path, digest: str) -> None:
    """Copies an engine directory and verifies the copy. TARGET exists; what else it holds is removed.

    Args:
        source: The engine directory as it was brought.
        target: Where the worker looks for it; may be `source`.
        digest: The engine's digest, 64 lower-case hexadecimal digits.

    Raises:
        NotFoundError: There is no such directory, or no contract in it.
        FailedPreconditionError: It is another engine, a file is not the one that the contract lists, or the disk does
            not take the copy.
    """
    found = engine_digest(source)
    if found != digest:
        raise FailedPreconditionError(f"{source} holds the engine {found}, and the one asked for is {digest}")
    try:
        if not (target.exists() and source.samefile(target)):
            _copy(source, target)
    except OSError as error:
        raise FailedPreconditionError(f"the engine cannot be copied to {target}: {error}") from error
    _, findings = read(target)
    if findings:
        wrong = "; ".join(f"{each.path} is {each.found}, expected {each.expected}" for each in findings)
        raise FailedPreconditionError(f"{target} is not what its contract says: {wrong}")


def _copy(source: Path, target: Path) -> None:
    """An earlier attempt may have left a part of it, or of another engine."""
    for entry in target.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    # Contents alone: the folder of a volume is its node's, and neither mode nor time of it are ours to set.
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir():
            copy.mkdir()
        else:
            shutil.copyfile(path, copy)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 placed, 1 refused, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="python -m services.worker.placing", description="Places one engine.")
    parser.add_argument("source", type=Path, help="the engine directory as it was brought")
    parser.add_argument("target", type=Path, help="where the worker looks for it; may be SOURCE")
    parser.add_argument("--digest", required=True, help="digest of the engine: the SHA-256 of its contract.json")
    asked = parser.parse_args(argv)
    digest = _DIGEST.fullmatch(asked.digest)
    if digest is None:
        parser.error(f"--digest is {asked.digest!r}; allowed is 64 hexadecimal digits, with or without sha256: before")
    try:
        place(asked.source, asked.target, digest[1])
    except FabricError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{asked.target} holds the engine {digest[1]}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
