# SPDX-License-Identifier: Apache-2.0
"""How much brokers may have outstanding here.

The batcher must never starve, and brokers shall decide as late as possible: so an engine's worth of work is in the
batcher and a small look-ahead waits behind it. An engine that generates can lose many sequences in one step and has
half its slots again as look-ahead; one that only computes prompts can end all of them in every step and has all its
slots again. Tokens are bounded by what the KV pool holds, counted in logical tokens: a pool in which prompts share
heads holds more of them, as measured.

Brokers share the engine evenly, counting only those that have work here; a broker without any is offered what it would
get as one more. What a broker had been granted once is never held against it, so that a grant that shrinks while work
is on its way refuses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

_REUSE_MAX = 64.0


@dataclass(frozen=True, slots=True)
class Amount:
    """Work, by what is scarce."""

    tokens: int
    """Prompt tokens and the most that may be generated, over all samples."""
    sequences: int
    payload_bytes: int

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.tokens + other.tokens, self.sequences + other.sequences, self.payload_bytes + other.payload_bytes
        )

    def __sub__(self, other: Amount) -> Amount:
        return Amount(
            self.tokens - other.tokens, self.sequences - other.sequences, self.payload_bytes - other.payload_bytes
        )

    def within(self, limit: Amount) -> bool:
        """Whether no part exceeds the limit's."""
        return (
            self.tokens <= limit.tokens
            and self.sequences <= limit.sequences
            and self.payload_bytes <= limit.payload_bytes
        )

    def most(self, other: Amount) -> Amount:
        """The larger of each part."""
        return Amount(
            max(self.tokens, other.tokens),
            max(self.sequences, other.sequences),
            max(self.payload_bytes, other.payload_bytes),
        )


NOTHING = Amount(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a loaded engine can have in work, from its own description."""

    slots: int
    max_input_tokens: int
    max_sequence_tokens: int
    max_output_tokens: int
    """0 where it generates nothing."""
    samples_max: int
    step_token_budget: int
    pool_tokens: int | None
    """Tokens that the KV pool holds; None without a cache."""
    payload_bytes: int
    """Of one finished request; 0 without payload."""

    @property
    def sequences(self) -> int:
        """Sequences in the batcher and in the look-ahead."""
        return self.slots + (max(2, self.slots // 2) if self.max_output_tokens else self.slots)

    @property
    def largest_item(self) -> Amount:
        """The largest item that the engine takes: every broker can send at least this."""
        return Amount(
            self.max_input_tokens + self.samples_max * self.max_output_tokens, self.samples_max, self.payload_bytes
        )

    def credit(self, *, shares: int, reuse: float) -> Amount:
        """Returns the credit of one broker.

        Args:
            shares: Brokers among whom the engine is shared; at least 1.
            reuse: Logical prompt tokens for each one computed, as measured; at least 1.
        """
        tokens = self.sequences * self.max_sequence_tokens
        if self.pool_tokens is not None:
            ahead = self.sequences / self.slots
            tokens = min(tokens, int(self.pool_tokens * reuse * ahead) + self.step_token_budget)
        whole = Amount(tokens, self.sequences, self.sequences * self.payload_bytes)
        share = Amount(whole.tokens // shares, whole.sequences // shares, whole.payload_bytes // shares)
        return share.most(self.largest_item)


def reuse(computed_tokens: int, cached_tokens: int) -> float:
    """Returns how many logical prompt tokens one computed token has stood for; 1 before anything was computed."""
    if not computed_tokens:
        return 1.0
    return min(_REUSE_MAX, (computed_tokens + cached_tokens) / computed_tokens)


class Account:
    """What one broker may have outstanding, and has."""

    def __init__(self, granted: Amount) -> None:
        self.granted = granted
        """The newest grant."""
        self.outstanding = NOTHING
        """What was taken and has not been given back."""
        self._ever = granted

    def grant(self, amount: Amount) -> bool:
        """Replaces the grant; returns whether it differs from the one before."""
        changed = amount != self.granted
        self.granted, self._ever = amount, self._ever.most(amount)
        return changed

    def take(self, cost: Amount) -> bool:
        """Takes an item's cost, or returns False where it exceeds every grant so far."""
        after = self.outstanding + cost
        if not after.within(self._ever):
            return False
        self.outstanding = after
        return True

    def give_back(self, cost: Amount) -> None:
        """Returns what `take` took, once the item's end is on its way to the broker."""
        self.outstanding = self.outstanding - cost


class CreditBook:
    """The accounts of all brokers of one engine."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._accounts: set[Account] = set()
        self._reuse = 1.0

    def open(self) -> Account:
        """Opens an account for one more broker."""
        account = Account(self._amount(NOTHING))
        self._accounts.add(account)
        return account

    def close(self, account: Account) -> None:
        """Ends an account, whatever it has outstanding."""
        self._accounts.discard(account)

    def measure(self, computed_tokens: int, cached_tokens: int) -> None:
        """Takes in how many prompt tokens were computed and how many were not needed to be."""
        self._reuse = reuse(computed_tokens, cached_tokens)

    def due(self, account: Account) -> Amount:
        """Returns what the account should be granted now."""
        return self._amount(account.outstanding)

    def _amount(self, outstanding: Amount) -> Amount:
        busy = sum(other.outstanding != NOTHING for other in self._accounts)
        shares = busy if outstanding != NOTHING else busy + 1
        return self.capacity.credit(shares=shares, reuse=self._reuse)
