# SPDX-License-Identifier: Apache-2.0
"""A cache-aware router from the package index over the same simulated workers: `make bench-peers [TRACES=DIR]`.

sglang-router 0.3.2, policy `cache_aware` with its own defaults, is installed into an environment of its own
(`requirements/peers.lock`), started as a process, and asked over HTTP where each request goes; the cards behind it are
those of `make bench-traces`, in virtual time (`benchmarks/virtual/router.py`). It serves requests in order of arrival,
which is what such a router is for; `fabric` is our broker's core, which may choose the order. Prompts reach the router
as text, 16 characters for a block of 512 tokens.

    computed_over_bound   prompt tokens computed over the least possible
    makespan_over_bound   time over a lower bound from the cards' own speeds

Where the router cannot be had or driven, `stopped_by` says why, and its rows are missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.frame import ROOT, Report, take_no_options
from benchmarks.virtual import bounds, fleet
from benchmarks.virtual.engine import Card
from benchmarks.virtual.policies import ArrivalOrder, CacheAware, Fabric
from benchmarks.virtual.router import HttpRouter, Routed, RouterError
from benchmarks.virtual.workloads import Workload, mooncake, shared_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.virtual.fleet import Policy

ENVIRONMENT = ROOT / "build" / "peers"
LOCK = ROOT / "requirements" / "peers.lock"
WORKERS = 4
TRACE_ROWS = 3000
"""Rows of the published trace that are taken: each costs the router two round trips."""
ROUTER = "sglang_router_cache_aware"


def interpreter() -> Path:
    """Makes the router's environment where there is none; returns its Python.

    Raises:
        RouterError: it cannot be installed.
    """
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "lock"
    if not stamp.exists() or stamp.read_bytes() != LOCK.read_bytes():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--require-hashes",
            "-r",
            str(LOCK),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise RouterError(f"sglang-router cannot be installed: {done.stderr.strip().splitlines()[-1]}")
        stamp.write_bytes(LOCK.read_bytes())
    return python


def command(ports: Sequence[int], urls: Sequence[str]) -> list[str]:
    """The router's command line. Limits that exist to protect real workers are out of the way; routing is as it is."""
    port, metrics = map(str, ports)
    return [
        *(str(interpreter()), "-m", "sglang_router.launch_router"),
        *("--host", "127.0.0.1", "--port", port, "--prometheus-host", "127.0.0.1", "--prometheus-port", metrics),
        *("--worker-urls", *urls, "--policy", "cache_aware", "--log-level", "error"),
        *("--max-concurrent-requests", "65536", "--request-timeout-secs", "86400", "--disable-retries"),
        *("--disable-circuit-breaker", "--disable-health-check"),
    ]


def workloads(folder: Path | None) -> list[Workload]:
    """The jobs: generated groups, and the beginning of a published trace where there is one."""
    made = [
        shared_heads("shared_prefix", groups=192, prompts=16, head=2048, tail=128, output=256, block_tokens=512, seed=1)
    ]
    if folder is not None:
        trace = mooncake(folder / "conversation_trace.jsonl")
        made.append(replace(trace, rows=trace.rows[:TRACE_ROWS]))
    return made


def row(workload: Workload, name: str, policy: Policy, cards: Sequence[Card]) -> dict[str, Any]:
    """Runs one cell of the table and prints it."""
    outcome = fleet.run(policy, cards)
    assert outcome.ended == len(workload.rows), "a request was lost"
    made = {
        "trace": workload.name,
        "requests": len(workload.rows),
        "workers": len(cards),
        "policy": name,
        "computed_over_bound": round(outcome.computed_tokens / workload.bound_tokens(), 4),
        "makespan_over_bound": round(outcome.makespan_us / bounds.makespan_us(workload, cards), 4),
        "least_busy_over_busiest": round(min(outcome.busy_us) / max(outcome.busy_us), 4),
    }
    print(
        f"{workload.name:<16}{name:<28}{made['computed_over_bound']:>15.3f}{made['makespan_over_bound']:>15.3f}"
        f"{made['least_busy_over_busiest']:>10.3f}",
        flush=True,
    )
    return made


def main() -> None:
    """Runs all cells."""
    take_no_options(__doc__)
    folder = Path(os.environ["TRACES"]) if os.environ.get("TRACES") else None
    if folder is not None and not (folder / "conversation_trace.jsonl").exists():
        sys.exit(f"TRACES={folder} has no conversation_trace.jsonl: name the folder of the published traces")
    report = Report("peers")
    rows: list[dict[str, Any]] = []
    stopped_by = ""
    cards = [Card()] * WORKERS
    print(f"{'trace':<16}{'policy':<28}{'computed/bound':>15}{'makespan/bound':>15}{'balance':>10}")
    for workload in workloads(folder):
        rows.append(row(workload, "fabric", Fabric(workload, cards), cards))
        rows.append(row(workload, "cache_aware_fifo", CacheAware(workload, cards), cards))
        rows.append(row(workload, "arrival_lru", ArrivalOrder(workload, cards), cards))
        try:
            with HttpRouter(WORKERS, command) as router:
                rows.append(row(workload, ROUTER, Routed(workload, cards, router), cards))
        except RouterError as error:
            stopped_by = str(error)
            print(f"{workload.name:<16}{ROUTER}: {stopped_by}")
    for name in ("fabric", ROUTER):
        values = [made["computed_over_bound"] for made in rows if made["policy"] == name]
        if values:
            report.figure(f"computed_over_bound_{name}", values, unit="")
    report.fact("rows", rows)
    report.fact("stopped_by", stopped_by)
    report.print()


if __name__ == "__main__":
    main()
