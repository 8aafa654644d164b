# SPDX-License-Identifier: Apache-2.0
"""A comparison as figures, as a page to look at, and as evidence beside the engine that is judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from engines import evidence
from engines.compare.generation import GenerationComparison
from engines.plots.page import Page
from engines.plots.svg import Chart
from engines.wording import plain

if TYPE_CHECKING:
    from pathlib import Path

    from engines.compare.payloads import PayloadComparison

    Comparison = GenerationComparison | PayloadComparison

KIND: Final = "comparison"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a comparison must keep to hold; None asks for nothing."""

    max_kl: float | None = None
    """In nats."""
    min_top1: float | None = None
    min_cosine: float | None = None
    max_difference: float | None = None
    """Of log-probabilities of given tokens, at the 99th of 100, in nats."""

    def broken(self, result: Comparison) -> list[str]:
        """What is not kept, a sentence each."""
        if isinstance(result, GenerationComparison):
            checks = [
                ("the mean divergence is", result.kl_mean, "nats, at most", self.max_kl, 1),
                (
                    "the log-probabilities of 99 of 100 given tokens differ by up to",
                    result.given_quantile(0.99),
                    "nats, at most",
                    self.max_difference,
                    1,
                ),
                ("the top choices agree at", result.top1_mean, "of the positions, at least", self.min_top1, -1),
            ]
        else:
            checks = [("the least cosine is", result.cosine_min, ", at least", self.min_cosine, -1)]
        found = [
            f"{what} {value:.5g} {unit} {bound:g} is asked for".replace(" ,", ",")
            for what, value, unit, bound, sign in checks
            if bound is not None and not sign * value <= sign * bound
        ]
        if not isinstance(result, GenerationComparison) and result.nonfinite:
            found.append(f"{result.nonfinite} values of hidden states are NaN or infinite")
        return found

    @property
    def any(self) -> bool:
        """Whether anything is asked for."""
        return any(each is not None for each in (self.max_kl, self.min_top1, self.min_cosine, self.max_difference))


def figures(result: Comparison) -> dict[str, float]:
    """The figures by name; divergences in nats."""
    if isinstance(result, GenerationComparison):
        parted = [each for each in result.first_divergence if each is not None]
        return {
            "prompts": result.prompts,
            "positions": result.tokens,
            "kl_mean": result.kl_mean,
            "kl_standard_error": result.kl_error,
            "kl_max_position": float(result.kl.max()),
            "top1_agreement": result.top1_mean,
            "same_greedy_texts": result.same_texts,
            "first_divergence_median": float(np.median(parted)) if parted else float(result.tokens),
            "perplexity_a": result.prompt_perplexity[0],
            "perplexity_b": result.prompt_perplexity[1],
            "given_tokens": result.given.size,
            **_given(result),
        }
    return {
        "prompts": result.prompts,
        "cosine_min": result.cosine_min,
        "cosine_mean": float(result.cosine.mean()),
        "error_max": float(result.error.max()),
        "nonfinite": result.nonfinite,
    }


def _given(result: GenerationComparison) -> dict[str, float]:
    """Differences of the log-probabilities of given tokens, where there are any."""
    if not result.given.size:
        return {}
    return {
        "given_difference_mean": float(result.given.mean()),
        "given_difference_rms": float(np.sqrt(np.mean(result.given**2))),
        "given_difference_p99": result.given_quantile(0.99),
        "given_difference_max": result.given_quantile(1.0),
    }


def document(result: Comparison) -> dict[str, Any]:
    """Everything, for `--json`."""
    rows: dict[str, Any] = dict(figures(result))
    if isinstance(result, GenerationComparison):
        rows |= {"kl": result.kl.tolist(), "top1": result.top1.tolist()}
        rows["first_divergence"] = list(result.first_divergence)
    else:
        rows["layers"] = list(result.layers)
        rows["cosine_by_layer"] = result.cosine.min(axis=0).tolist()
    return rows


def summary(result: Comparison) -> str:
    """What was found, in one sentence."""
    if not isinstance(result, GenerationComparison):
        return f"over {result.prompts} prompts the least cosine of the last token's state is {result.cosine_min:.6f}"
    found = (
        f"over {result.prompts} prompts and {result.tokens} positions the divergence is {result.kl_mean:.4g} nats "
        f"(estimated, standard error {result.kl_error:.2g}), the top choices agree at {result.top1_mean:.2%}, and "
        f"{result.same_texts} of {result.prompts} greedy texts are the same"
    )
    if not result.given.size:
        return found
    rms = _given(result)["given_difference_rms"]
    return f"{found}; log-probabilities of {result.given.size} given tokens differ by {rms:.3g} nats (exact, rms)"


def page(result: Comparison, a: str, b: str, broken: list[str], command: str) -> bytes:
    """The comparison as one page of HTML; `a` and `b` name the engines."""
    out = Page(f"{b} against {a}")
    out.text(summary(result), kind="fails" if broken else "")
    for sentence in broken:
        out.text(f"Fails: {sentence}.", kind="fails")
    out.command(command)
    if isinstance(result, GenerationComparison):
        positions = [float(at) for at in range(1, result.tokens + 1)]
        kl = Chart("Divergence by position", "position in the continuation", "nats")
        kl.line("KL(A || B)", list(zip(positions, result.kl.tolist(), strict=True)))
        top1 = Chart("Same top choice by position", "position in A's greedy text", "share of prompts")
        top1.line("agreement", list(zip(positions, result.top1.tolist(), strict=True)))
        parting = Chart("Greedy texts still the same", "position", "share of prompts")
        alive = [
            sum(each is None or each >= at for each in result.first_divergence) / result.prompts
            for at in range(1, result.tokens + 1)
        ]
        parting.line("same so far", list(zip(positions, alive, strict=True)))
        given = Chart("Given tokens: difference of log-probability", "share of tokens", "nats, at most")
        if result.given.size:
            shares = [at / 100 for at in range(1, 101)]
            given.line("|log p_A - log p_B|", [(share, result.given_quantile(share)) for share in shares])
        for chart in (kl, top1, parting, *([given] if result.given.size else [])):
            out.chart(chart.svg())
    else:
        chart = Chart("Distance in direction: 1 - cosine", "prompt", "1 - cosine", y_log=True)
        for at, layer in enumerate(result.layers):
            chart.dots(
                f"layer {layer}",
                [(float(n), max(1 - float(value), 1e-12)) for n, value in enumerate(result.cosine[:, at])],
            )
        out.chart(chart.svg())
    out.table(("figure", "value"), [(name, f"{value:.6g}") for name, value in figures(result).items()], numbers=(1,))
    return out.html()


def write_evidence(
    result: Comparison,
    engine: Path,
    believed: evidence.Input,
    broken: list[str],
    html: bytes,
    *,
    command: str,
    bound: bool,
) -> Path:
    """Adds the comparison to what lies beside the engine that was judged.

    Args:
        result: The comparison.
        engine: The engine directory.
        believed: The engine that it was compared with, by the digest of its contract.
        broken: What is not kept.
        html: The page.
        command: The command line that repeats it.
        bound: Whether anything was asked for.

    Raises:
        FabricError: As `engines.evidence.write`.
    """
    outcome = evidence.FAILS if broken else evidence.HOLDS if bound else evidence.MEASURED
    return evidence.write(
        engine,
        kind=KIND,
        outcome=outcome,
        summary=plain(summary(result)),
        command=command,
        figures=[evidence.Figure(name, value, "1") for name, value in figures(result).items()],
        findings=[evidence.EvidenceFinding(plain(engine.name), plain(each), command) for each in broken],
        inputs=[believed],
        attachments={"comparison.html": html},
    )
