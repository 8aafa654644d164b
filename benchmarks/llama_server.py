# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's own server, from a wheel that `requirements/llama-server.lock` pins, in an environment of its own.

    with running(Path("model.gguf"), slots=16, sequence_tokens=1280) as url: ...

The wheel (xllamacpp) carries the server as a library; a process of its own serves OpenAI-compatible HTTP with it on a
free port of loopback. One stream of the cache a slot, as the embedded runtime has it here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.frame import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

ENVIRONMENT = ROOT / "build" / "llama-server"
LOCK = ROOT / "requirements" / "llama-server.lock"
CLIENTS_MAX = 128
INSTALL_LIMIT_S, STOP_LIMIT_S = 600.0, 30.0


class LlamaServerError(Exception):
    """The server cannot be had or does not start; the message says why."""


def install() -> Path:
    """Installs the wheel where it is not there yet; returns the folder to import it from.

    Raises:
        LlamaServerError: It cannot be installed.
    """
    stamp = ENVIRONMENT / "lock"
    if stamp.exists() and stamp.read_bytes() == LOCK.read_bytes():
        return ENVIRONMENT
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--upgrade"]
    command += [
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--no-deps",
        "--target",
        str(ENVIRONMENT),
        "-r",
        str(LOCK),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    if done.returncode:
        raise LlamaServerError(f"xllamacpp cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    stamp.write_bytes(LOCK.read_bytes())
    return ENVIRONMENT


@contextlib.contextmanager
def running(
    model: Path, *, slots: int, sequence_tokens: int, step_tokens: int = 512, threads: int = 2
) -> Iterator[str]:
    """Serves a GGUF model until the block is left; gives `http://host:port`.

    Raises:
        LlamaServerError: It cannot be installed or does not start.
    """
    command = [sys.executable, "-m", "benchmarks.llama_server", str(model), "--slots", str(slots)]
    command += ["--sequence-tokens", str(sequence_tokens), "--step-tokens", str(step_tokens), "--threads", str(threads)]
    paths = os.pathsep.join((str(install()), str(ROOT), os.environ.get("PYTHONPATH", "")))
    # The wheel's OpenMP threads spin while they wait, and lose all speed where anything else wants their cores: 0.8
    # tokens/s instead of 35 on two busy ones.
    surroundings = {**os.environ, "PYTHONPATH": paths, "GOMP_SPINCOUNT": "0"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=surroundings
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if not url:
                raise LlamaServerError(f"llama.cpp's server ended with status {process.wait(STOP_LIMIT_S)}")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    """Serves until SIGTERM; the first line on stdout is the address."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    for name in ("slots", "sequence-tokens", "step-tokens", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    said = parser.parse_args()
    library = importlib.import_module("xllamacpp")
    wanted = library.CommonParams()
    wanted.model.path = str(said.model)
    wanted.n_parallel = said.slots
    wanted.n_ctx = said.slots * said.sequence_tokens
    wanted.n_batch = wanted.n_ubatch = said.step_tokens
    wanted.kv_unified = False
    wanted.cpuparams.n_threads = wanted.cpuparams_batch.n_threads = said.threads
    wanted.n_threads_http = CLIENTS_MAX
    wanted.hostnames, wanted.port = ["127.0.0.1"], 0
    # Before the server starts threads: each of them inherits the mask, so that the signal waits for this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    server = library.Server(wanted)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    # The library joins its threads when it is collected, and has hung there; nothing of it is worth waiting for.
    os._exit(0)


if __name__ == "__main__":
    main()
