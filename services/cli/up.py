# SPDX-License-Identifier: Apache-2.0
"""`ifab up`: the suite on this machine, up until it is told to stop."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import grpcurl, options
from services.cli.ready import serving_engines
from services.cli.running import run, write_json
from services.cli.suite import Plan, Suite
from services.common.settings import join_address, split_address

if TYPE_CHECKING:
    from services.cli.suite import Service


def _address(text: str) -> str:
    try:
        split_address(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not {error}") from None
    return text


_Listen = typer.Option(metavar="HOST:PORT", callback=_address, help="Where it listens; port 0 takes a free one.")


def up(
    engine: options.Engines = [options.ENGINE_DIRECTORY],  # noqa: B006 -- typer reads it, nobody writes to it
    broker: Annotated[str, _Listen] = options.BROKER_ADDRESS,
    provisioner: Annotated[str, _Listen] = options.PROVISIONER_ADDRESS,
    worker: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            callback=_address,
            help="Where the first worker listens; further ones take the next ports.",
        ),
    ] = options.WORKER_ADDRESS,
    free_ports: Annotated[bool, typer.Option("--free-ports", help="Take free ports everywhere.")] = False,
    logs: options.Logs = options.LOG_DIRECTORY,
    grace: options.Grace = 10.0,
    start_limit: options.StartLimit = 120.0,
    as_json: options.AsJson = False,
) -> None:
    """Start provisioner, workers and broker, print how to reach them, and stay until Ctrl-C.

    With --json one line on stdout has all addresses and the grpcurl lines. Ctrl-C or SIGTERM stops everything; the exit
    status is 0 then, and 1 where a service ended by itself.

    Example: ifab up --engine build/engines/smollm2-135m
    """
    if free_ports:
        plan = Plan(tuple(engine), logs, grace_s=grace, start_limit_s=start_limit)
    else:
        workers = tuple(_next(worker, number) for number in range(len(engine)))
        plan = Plan(tuple(engine), logs, broker, provisioner, workers, grace_s=grace, start_limit_s=start_limit)
    run(_up(plan, as_json), as_json=as_json, signal_ends_well=True)


async def _up(plan: Plan, as_json: bool) -> None:
    async with Suite(plan) as suite:
        engines = await serving_engines(suite, limit_s=plan.start_limit_s)
        engine_of = {node: engine.contract.engine_id for engine in engines for node in engine.node_ids}
        lines = grpcurl.lines(suite, [engine_of[worker.name] for worker in suite.workers])
        if as_json:
            write_json(
                {
                    "broker": _reach(suite.broker),
                    "provisioner": _reach(suite.provisioner),
                    "workers": [
                        {**_reach(worker), "node_id": worker.name, "engine_id": engine_of[worker.name]}
                        for worker in suite.workers
                    ],
                    "protoset": str(grpcurl.protoset()),
                    "grpcurl": [{"shows": line.shows, "command": line.command} for line in lines],
                }
            )
        else:
            _print(suite, lines)
        await suite.watch()


def _print(suite: Suite, lines: list[grpcurl.Line]) -> None:
    for service in suite.services:
        sys.stdout.write(f"{service.name:<12} {service.address:<22} metrics http://{service.metrics}/metrics\n")
    for line in lines:
        sys.stdout.write(f"\n# {line.shows}\n{line.command}\n")
    sys.stdout.write("\nAll is up. Ctrl-C stops it.\n")
    sys.stdout.flush()


def _reach(service: Service) -> dict[str, Any]:
    return {
        "address": service.address,
        "metrics": service.metrics,
        "pid": service.process.pid,
        "log": str(service.log),
    }


def _next(address: str, number: int) -> str:
    host, port = split_address(address)
    return join_address(host, port + number if port else 0)
