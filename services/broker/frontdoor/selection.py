# SPDX-License-Identifier: Apache-2.0
"""Which engines may serve a request, and what each of them allows.

A request names what it wants, never where it runs. All engines that match its selector are candidates; those whose
contract admits the request may serve it, and the core decides which one does. Without a selector that is only an
answer while the candidates are *one model*: a request that any of two models could serve would get the words of
either, so it is refused with the question which one is meant.

Two engines are one model where tokenizer (by digest), architecture, layers, width and vocabulary agree. Tiers of one
checkpoint, built for different cards, formats and limits, therefore serve the same requests. A contract does not say
which checkpoint an engine was built from: two fine-tunes of one base in one fleet need a selector, and nothing here
can tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ifabric.engine.v1 import contract_pb2
from services.common import reasons
from services.common.errors import FailedPreconditionError, NotFoundError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ifabric.broker.v1 import broker_service_pb2
    from services.broker.work import Catalog, CatalogEngine

_DTYPE_BYTES = {
    contract_pb2.PAYLOAD_DTYPE_FLOAT32: 4,
    contract_pb2.PAYLOAD_DTYPE_FLOAT16: 2,
    contract_pb2.PAYLOAD_DTYPE_BFLOAT16: 2,
}
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What the front door needs of one engine's contract."""

    digest: str
    engine_id: str
    model: tuple[str, str, int, int, int]
    """Tokenizer digest, architecture, layers, hidden size, vocabulary: equal for engines of one model."""
    tokenizer_path: str
    tokenizer_sha256: str
    vocab_size: int
    max_input_tokens: int
    max_sequence_tokens: int
    max_output_tokens: int
    samples_max: int
    guides: frozenset[int]
    """`contract_pb2.GuideKind` numbers that the engine enforces."""
    scoring: bool
    payload_bytes: int
    """Of each finished request; 0 where it carries none."""

    @property
    def generates(self) -> bool:
        """Whether the engine makes tokens at all."""
        return self.max_output_tokens > 0

    @classmethod
    def of(cls, engine: CatalogEngine) -> EngineProfile:
        """Reads a contract that the provisioner accepted, and that therefore has every field."""
        contract = engine.contract
        model, limits, capabilities = contract.model, contract.limits, contract.capabilities
        path = contract.tokenizer.file
        sha256 = next(file.sha256 for file in contract.files if file.path == path)
        form = capabilities.payload
        return cls(
            digest=engine.digest,
            engine_id=contract.engine_id,
            model=(sha256, model.architecture, model.layers, model.hidden_size, model.vocab_size),
            tokenizer_path=path,
            tokenizer_sha256=sha256,
            vocab_size=model.vocab_size,
            max_input_tokens=limits.max_input_tokens,
            max_sequence_tokens=limits.max_sequence_tokens,
            max_output_tokens=limits.max_output_tokens,
            samples_max=capabilities.samples_max,
            guides=frozenset(capabilities.guided_decoding),
            scoring=capabilities.scoring,
            payload_bytes=(
                math.prod(form.value.shape) * _DTYPE_BYTES[form.value.dtype]
                if form.WhichOneof("kind") == "value"
                else 0
            ),
        )


@dataclass(frozen=True, slots=True)
class Candidates:
    """Engines that match one selector; at least one."""

    engines: tuple[EngineProfile, ...]
    digests: frozenset[str]
    """Of all of them."""
    one_model: bool

    @classmethod
    def of(cls, engines: Sequence[EngineProfile]) -> Candidates:
        """Puts engines together."""
        return cls(
            engines=tuple(engines),
            digests=frozenset(engine.digest for engine in engines),
            one_model=all(engine.model == engines[0].model for engine in engines),
        )


class EngineDirectory:
    """The catalog's engines as profiles, read again only when the catalog has changed."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._revision: int | None = None
        self._profiles: tuple[EngineProfile, ...] = ()
        self._matches: dict[tuple[str, str], Candidates] = {}

    def candidates(self, selector: broker_service_pb2.EngineSelector) -> Candidates:
        """Returns the engines that match a selector.

        Raises:
            NotFoundError: none does.
            UnavailableError: the broker has not heard yet which engines there are, or none is accepted.
        """
        if self._revision != self._catalog.revision:
            self._read()
        key = (selector.engine_digest, selector.engine_id)
        return self._matches.get(key) or self._match(*key)

    def _read(self) -> None:
        self._revision = self._catalog.revision
        self._profiles = tuple(EngineProfile.of(engine) for engine in self._catalog.engines())
        self._matches = {}

    def _match(self, digest: str, engine_id: str) -> Candidates:
        engines = [
            profile
            for profile in self._profiles
            if digest in ("", profile.digest) and engine_id in ("", profile.engine_id)
        ]
        if not engines:
            raise self._nobody(digest, engine_id)
        # Only selectors that match are kept: what clients make up must not fill the memory.
        matched = self._matches[digest, engine_id] = Candidates.of(engines)
        return matched

    def _nobody(self, digest: str, engine_id: str) -> NotFoundError | UnavailableError:
        if not self._catalog.synced:
            return UnavailableError(
                "the broker has not heard yet which engines are accepted", retry_after_s=_RETRY_AFTER_S
            )
        if not digest and not engine_id:
            return UnavailableError("no engine is accepted", retry_after_s=_RETRY_AFTER_S)
        wanted = " and ".join(
            f"{name} {value[:128]!r}" for name, value in (("engine_digest", digest), ("engine_id", engine_id)) if value
        )
        known = ", ".join(sorted({profile.engine_id for profile in self._profiles})[:16]) or "none"
        return NotFoundError(
            f"engine: no accepted engine has {wanted}; accepted are: {known}", reason=reasons.ENGINE_UNKNOWN
        )


def ambiguous(engines: Iterable[EngineProfile]) -> FailedPreconditionError:
    """The refusal of a request that several models could serve."""
    names = ", ".join(sorted({engine.engine_id for engine in engines})[:16])
    return FailedPreconditionError(
        f"engine: several models can serve this request ({names}); name one by engine_id or engine_digest",
        reason=reasons.PRECONDITION,
        metadata={"engine_ids": names[:512]},
    )
