# SPDX-License-Identifier: Apache-2.0
"""`ifab engine compare`: the same prompts through two engines."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli import options
from services.cli.judging import suites
from services.cli.running import CommandError, run, write_columns, write_json
from services.common.contract import Contract, engine_digest

if TYPE_CHECKING:
    from engines.compare.report import Bounds


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="Engine directory that is believed.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Engine directory that is judged.")],
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines with `prompt`; random words where absent.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="Most prompts taken.")] = 32,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, max=4096, help="Length of continuations.")] = 32,
    max_kl: Annotated[float | None, typer.Option(help="Fail above this mean divergence, in nats.")] = None,
    min_top1: Annotated[float | None, typer.Option(help="Fail below this share of equal top choices.")] = None,
    min_cosine: Annotated[float | None, typer.Option(help="Fail below this cosine of hidden states.")] = None,
    max_difference: Annotated[
        float | None,
        typer.Option(help="Fail if log-probabilities of 99 of 100 given tokens differ by more, in nats."),
    ] = None,
    html: suites.Html = None,
    evidence: suites.Keep = True,
    start_limit: suites.StartLimit = 120.0,
    as_json: options.AsJson = False,
) -> None:
    """Compare the outputs of two engines: divergence and top choice by position, first divergence, hidden states.

    Engines that generate are compared by log-probabilities, others by the cosine of their hidden states. The divergence
    is an estimate from sampled texts; the difference on given tokens, those of the prompts, is exact. Without bounds
    it measures; with bounds it fails where one is not kept. The result is kept as evidence beside B.

    Example: ifab engine compare build/engines/smollm2-135m build/engines/smollm2-135m-q4 --max-kl 0.05
    """
    from engines.compare.report import Bounds

    bounds = Bounds(max_kl, min_top1, min_cosine, max_difference)
    words = ["ifab", "engine", "compare", a, b, *(["--prompts", prompts] if prompts else [])]
    words += ["--count", count, "--tokens", tokens]
    for flag, bound in (
        ("--max-kl", max_kl),
        ("--min-top1", min_top1),
        ("--min-cosine", min_cosine),
        ("--max-difference", max_difference),
    ):
        words += [flag, bound] if bound is not None else []
    run(_compare(a, b, prompts, count, tokens, bounds, html, evidence, start_limit, words, as_json), as_json=as_json)


async def _compare(
    a: Path,
    b: Path,
    file: Path | None,
    count: int,
    tokens: int,
    bounds: Bounds,
    html: Path | None,
    keep: bool,
    start_limit_s: float,
    words: list[object],
    as_json: bool,
) -> None:
    from tokenizers import Tokenizer

    from engines import evidence
    from engines.compare import generation, payloads, report
    from engines.compare.requests import fitting
    from engines.ladder import workload
    from engines.targets.broker import BrokerTarget
    from engines.wording import command_line

    texts = workload.read_prompts(file)[:count] if file else workload.synthetic(count)
    believed, judged = engine_digest(a), engine_digest(b)
    engines = [a] if believed == judged else [a, b]
    async with suites.running(engines, start_limit_s=start_limit_s) as suite:
        contracts = [Contract.from_proto(suite.engines[digest].contract) for digest in (believed, judged)]
        generates = [contract.limits.max_output_tokens > 0 for contract in contracts]
        if generates[0] != generates[1]:
            raise CommandError(f"one of {a} and {b} generates text and the other does not: there is nothing to compare")
        tokenizer = Tokenizer.from_file(str(a / contracts[0].tokenizer.file))
        ids = [tokenizer.encode(text).ids for text in texts]
        fit = fitting(ids, contracts[0], contracts[1], tokens if generates[0] else 0)
        left, right = (BrokerTarget(suite.channels, engine_digest=digest) for digest in (believed, judged))
        result: report.Comparison
        if generates[0]:
            result = await generation.compare(left, right, fit, tokens=tokens)
        else:
            result = await payloads.compare(left, right, fit)
    broken, command = bounds.broken(result), command_line(words)
    page = report.page(result, contracts[0].engine_id, contracts[1].engine_id, broken, command)
    if html is not None:
        await asyncio.to_thread(html.write_bytes, page)
    kept = None
    if keep:
        source = evidence.Input(contracts[0].engine_id, believed)
        kept = report.write_evidence(result, b, source, broken, page, command=command, bound=bounds.any)
    if as_json:
        write_json({**report.document(result), "broken": broken, "evidence": str(kept) if kept else None})
    else:
        write_columns([(name, f"{value:.6g}") for name, value in report.figures(result).items()])
        sys.stdout.write(report.summary(result) + "\n")
    if broken:
        raise CommandError("; ".join(broken), reported=as_json)
