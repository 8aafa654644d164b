# SPDX-License-Identifier: Apache-2.0
"""A PostgreSQL of the tests' own: Debian's programs, a folder of its own, a unix socket, no network."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psycopg

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROGRAMS = Path("/usr/lib/postgresql")
_USERS = ("postgres", "nobody")
"""PostgreSQL does not run as root: one of these does it then."""
SETTINGS = (
    "listen_addresses=", "fsync=on", "synchronous_commit=on", "shared_buffers=64MB", "max_connections=100",
    "max_wal_size=256MB",
)  # fmt: skip


def programs() -> Path | None:
    """Folder of the newest server's programs; None where none is installed."""
    found = sorted(_PROGRAMS.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


class PostgresServer:
    """A running server. Leaving it ends the server and removes what it held."""

    def __init__(self) -> None:
        bin_folder = programs()
        assert bin_folder is not None, "PostgreSQL is missing: run scripts/bootstrap tests"
        self._bin = bin_folder
        # A socket's path has at most 107 bytes, and its folder must be the server's own.
        self.folder = Path(tempfile.mkdtemp(prefix="ifab-pg-"))
        self._user = _other_user() if os.geteuid() == 0 else None
        if self._user is not None:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
        self._data = self.folder / "data"
        self._run("initdb", "-D", str(self._data), "-U", "ifabric", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        self.start()

    def start(self) -> None:
        """Starts it; it listens when this returns."""
        options = " ".join(f"-c {setting}" for setting in SETTINGS) + f" -c unix_socket_directories={self.folder}"
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", str(self._data), "-l", log, "-o", options, "-w", "-t", "60", "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stops it; `immediate` is what a crash is."""
        self._run("pg_ctl", "-D", str(self._data), "-m", mode, "-w", "-t", "60", "stop")

    def new_database(self) -> str:
        """Makes a database and returns its URL."""
        name = f"d{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    @contextmanager
    def small_disk(self, size_mb: int) -> Iterator[tuple[str, Path]]:
        """Gives the URL of a database on a disk of its own, and the folder where that disk is.

        Raises:
            OSError: the system lets nobody mount one.
        """
        folder = self.folder / f"disk-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        owner = f",uid={self._user.pw_uid},gid={self._user.pw_gid}" if self._user is not None else ""
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=700{owner}", "none", str(folder)]
        if subprocess.run(mount, capture_output=True, timeout=20, check=False).returncode:
            raise OSError("mounting takes the right to")
        name = folder.name.replace("-", "")
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            try:
                connection.execute(f"CREATE TABLESPACE {name} LOCATION '{folder}'")
                connection.execute(f"CREATE DATABASE {name} TABLESPACE {name}")
                yield self.url(name), folder
            finally:
                connection.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
                connection.execute(f"DROP TABLESPACE IF EXISTS {name}")
                subprocess.run(["umount", str(folder)], timeout=20, check=True)

    def url(self, name: str) -> str:
        """URL of a database."""
        return f"postgresql://ifabric@/{name}?host={self.folder}"

    def tool(self, program: str, *arguments: str) -> None:
        """Runs one of the server's programs, such as `pg_dump`, to its end."""
        self._run(program, *arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        who: list[str] = []
        if self._user is not None:
            # Not by subprocess's `user`, for which it forks: of children that are forked while other threads are inside
            # gRPC, one in five died of SIGSEGV or SIGABRT before it was another program. Without it, none is.
            who = ["setpriv", f"--reuid={self._user.pw_uid}", f"--regid={self._user.pw_gid}", "--clear-groups"]
        done = subprocess.run(
            [*who, str(self._bin / program), *arguments],
            cwd=self.folder,
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if program != "pg_ctl" else subprocess.DEVNULL,
            stderr=subprocess.STDOUT if program != "pg_ctl" else subprocess.DEVNULL,
            text=True,
            timeout=120,
            check=False,
        )
        log = self._data.parent / "log"
        said = done.stdout or (log.read_text("utf-8", "replace")[-2000:] if log.exists() else "")
        assert done.returncode == 0, f"{program} ended with status {done.returncode}: {said}"


def _other_user() -> pwd.struct_passwd:
    for name in _USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise AssertionError(f"PostgreSQL does not run as root, and none of {_USERS} exists")
