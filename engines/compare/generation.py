# SPDX-License-Identifier: Apache-2.0
"""How far apart two engines are that generate, from the log-probabilities that they return.

Engine A samples a continuation of each prompt at temperature 1; both engines then score prompt and continuation. At
each position the divergence KL(A || B) is the mean over continuations x of r - 1 - log r with r = p_B(x) / p_A(x).
Since x was drawn from A, the mean of log r is -KL and that of r - 1 is 0, so the estimate is unbiased; since
r - 1 >= log r, no term is negative, and the spread of the terms is small where the engines agree.

On the prompts themselves nothing is sampled: both engines score the same given tokens, each behind the same text, and
the difference log p_A(x) - log p_B(x) of every token x is exact, the engines' own rounding aside. It is no divergence:
of each position it sees the one token that stands there. Its mean is the difference of the engines' cross-entropies on
these texts, log(perplexity of B / perplexity of A).

Top-1 agreement follows A's greedy text: does B choose the same token after the same text? Where B gives that token more
than half of its probability, it does; elsewhere B is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from engines.compare.requests import generation
from services.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from engines.targets.broker import BrokerTarget

    Floats = npt.NDArray[np.float64]

_RATIO_MAX: Final = 1e6
"""Largest ratio of probabilities that counts: one continuation that A hardly allows must not be all that is seen."""
_SURE: Final = float(np.log(0.5))


@dataclass(frozen=True, slots=True)
class GenerationComparison:
    """What was found over all prompts."""

    prompts: int
    tokens: int
    """Length of each continuation."""
    kl: Floats
    """Mean divergence at each position of the continuation, in nats, `[tokens]`."""
    kl_mean: float
    """Over all positions and prompts."""
    kl_error: float
    """Standard error of it, from prompt to prompt."""
    top1: Floats
    """Share of prompts at which both choose the same token, at each position of A's greedy text, `[tokens]`."""
    first_divergence: tuple[int | None, ...]
    """For each prompt the position at which the greedy texts part; None where they do not."""
    prompt_perplexity: tuple[float, float]
    """Of A and of B over the prompts."""
    given: Floats
    """log p_A - log p_B of every token of the prompts but the first of each, in nats, `[tokens scored]`; exact."""

    @property
    def top1_mean(self) -> float:
        """Over all positions and prompts."""
        return float(self.top1.mean())

    def given_quantile(self, share: float) -> float:
        """Quantile of the magnitudes of `given`; no number where no token was scored."""
        return float(np.quantile(np.abs(self.given), share)) if self.given.size else float("nan")

    @property
    def same_texts(self) -> int:
        """Prompts whose greedy texts are the same throughout."""
        return sum(each is None for each in self.first_divergence)


async def compare(
    a: BrokerTarget, b: BrokerTarget, prompts: Sequence[Sequence[int]], *, tokens: int, seed: int = 1
) -> GenerationComparison:
    """Compares two engines.

    Args:
        a: The engine that is believed.
        b: The engine that is judged.
        prompts: Token ids; each with `tokens` more behind it fits both engines.
        tokens: Length of continuations.
        seed: Of the first sample; those of further prompts follow.

    Raises:
        FabricError: An engine refused or failed a request.
        FailedPreconditionError: An engine ended a text early, though its end was ignored.
    """
    sampled = await _texts(a, prompts, tokens, temperature=1.0, seed=seed)
    greedy_a = await _texts(a, prompts, tokens)
    greedy_b = await _texts(b, prompts, tokens)
    scores_a = await _scores(a, prompts, sampled)
    scores_b = await _scores(b, prompts, sampled)
    ratio = np.minimum(np.exp(np.minimum(_tails(scores_b, tokens) - _tails(scores_a, tokens), 30.0)), _RATIO_MAX)
    terms = ratio - 1 - np.log(np.maximum(ratio, 1 / _RATIO_MAX))
    top1 = await _same_choice(b, prompts, greedy_a)
    means = terms.mean(axis=1)
    return GenerationComparison(
        len(prompts),
        tokens,
        terms.mean(axis=0),
        float(terms.mean()),
        float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else 0.0,
        top1,
        tuple(_parting(left, right) for left, right in zip(greedy_a, greedy_b, strict=True)),
        (_perplexity(scores_a, prompts), _perplexity(scores_b, prompts)),
        _given(scores_a, prompts) - _given(scores_b, prompts),
    )


async def _texts(
    target: BrokerTarget, prompts: Sequence[Sequence[int]], tokens: int, *, temperature: float = 0.0, seed: int = 0
) -> list[list[int]]:
    results = await target.answers(
        [
            generation(ids, max_tokens=tokens, temperature=temperature, seed=seed + number)
            for number, ids in enumerate(prompts)
        ]
    )
    texts = [list(result.samples[0].token_ids) for result in results]
    if short := [len(text) for text in texts if len(text) != tokens]:
        raise FailedPreconditionError(f"{target.name} ended a text after {short[0]} tokens, {tokens} were asked for")
    return texts


async def _scores(
    target: BrokerTarget, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[Floats]:
    """Log-probability of every token of prompt and text; that of the first is no number."""
    results = await target.answers(
        [
            generation([*ids, *text], max_tokens=1, prompt_logprobs=True)
            for ids, text in zip(prompts, texts, strict=True)
        ]
    )
    return [np.array(result.prompt_logprobs, dtype=np.float64) for result in results]


async def _same_choice(b: BrokerTarget, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Floats:
    tokens = len(texts[0])
    scores = _tails(await _scores(b, prompts, texts), tokens)
    same = scores > _SURE
    open_ = [(number, at) for number, at in np.argwhere(~same).tolist()]
    asked = await b.answers([generation([*prompts[number], *texts[number][:at]], max_tokens=1) for number, at in open_])
    for (number, at), result in zip(open_, asked, strict=True):
        same[number, at] = list(result.samples[0].token_ids) == [texts[number][at]]
    return np.asarray(same.mean(axis=0), np.float64)


def _tails(scores: Sequence[Floats], tokens: int) -> Floats:
    """The last `tokens` values of each, `[prompts, tokens]`."""
    return np.stack([each[-tokens:] for each in scores])


def _given(scores: Sequence[Floats], prompts: Sequence[Sequence[int]]) -> Floats:
    """The values of all prompts' own tokens but their first, one after another."""
    return np.concatenate([each[1 : len(ids)] for each, ids in zip(scores, prompts, strict=True)])


def _perplexity(scores: Sequence[Floats], prompts: Sequence[Sequence[int]]) -> float:
    values = _given(scores, prompts)
    return float(np.exp(-values.mean())) if values.size else 1.0


def _parting(left: Sequence[int], right: Sequence[int]) -> int | None:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)
