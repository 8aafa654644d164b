# SPDX-License-Identifier: Apache-2.0
"""Text to token ids with each engine's own tokenizer, and the store of these tokenizers."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from services.broker.frontdoor.detokenization import ByteLevelDecoder, TextDecoder, WholeTextDecoder
from services.broker.frontdoor.vocabulary import ByteVocabulary
from services.common.errors import FailedPreconditionError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from services.broker.frontdoor.selection import EngineProfile
    from services.broker.work import Catalog, TokenArray

INLINE_CHARACTERS = 8192
"""Texts of up to this many characters together are tokenized on the event loop: about 2 ms, less than two thread
switches cost the other streams of a busy process."""


class TextCodec:
    """One tokenizer, both ways. Immutable once made; its methods may be called from any thread.

    Args:
        document: Bytes of a `tokenizer.json`.

    Raises:
        ValueError: the document is no tokenizer.
    """

    def __init__(self, document: bytes) -> None:
        try:
            self._tokenizer = Tokenizer.from_buffer(document)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer document: {error}") from error
        # A document may ask for its prompts to be cut or padded: that is for training, never for somebody's prompt.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        form: dict[str, Any] = json.loads(document)
        self._vocabulary = self._byte_vocabulary() if _is_byte_level(form) else None
        self._unknown_id = self._unknown(form)
        self._unsettled = frozenset(self._control_ids() | self._byte_ids())
        self._adds_tokens = self._tokenizer.num_special_tokens_to_add(False) > 0

    @property
    def longest_token_bytes(self) -> int | None:
        """Size of the longest token, in bytes; None where tokens are no plain bytes."""
        return self._vocabulary.longest if self._vocabulary else None

    def encode(self, texts: Sequence[str]) -> list[TokenArray | None]:
        """Tokenizes texts, in order.

        Returns:
            Ids of each text, or None where the vocabulary cannot represent the text: its ids would mean another one.
        """
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        return [self._checked(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def decoder(self) -> TextDecoder:
        """Returns a decoder for one sample."""
        if self._vocabulary is not None:
            return ByteLevelDecoder(self._vocabulary)
        return WholeTextDecoder(self._tokenizer, self._unsettled)

    def decode(self, tokens: TokenArray) -> str:
        """Returns the text of a whole sample."""
        if self._vocabulary is not None:
            return self._vocabulary.output(tokens.tolist()).decode("utf-8", "replace")
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def _checked(self, text: str, encoding: Any) -> TokenArray | None:
        ids: list[int] = encoding.ids
        if self._vocabulary is not None:
            normalizer = self._tokenizer.normalizer
            meant = normalizer.normalize_str(text) if normalizer is not None else text
            own = ids
            if self._adds_tokens:
                own = [token for token, added in zip(ids, encoding.special_tokens_mask, strict=True) if not added]
            if self._vocabulary.prompt(own) != meant.encode():
                return None
        elif self._unknown_id is not None and self._unknown_id in ids:
            return None
        return np.array(ids, dtype=np.int32)

    def _byte_vocabulary(self) -> ByteVocabulary:
        tokens = {token_id: text for text, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items()}
        return ByteVocabulary(tokens, self._control_ids())

    def _control_ids(self) -> set[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token_id for token_id, token in added.items() if token.special}

    def _byte_ids(self) -> set[int]:
        """Ids of the tokens that stand for single bytes where a character has no token."""
        ids = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(0x100))
        return {token_id for token_id in ids if token_id is not None}

    def _unknown(self, form: dict[str, Any]) -> int | None:
        name = form.get("model", {}).get("unk_token")
        return self._tokenizer.token_to_id(name) if isinstance(name, str) else None


class CodecStore:
    """Codecs by the digest of their document, fetched from workers through the catalog when first needed.

    Args:
        catalog: Where documents come from.
        executor: Runs what takes long: reading a document, tokenizing long texts.
        capacity: Codecs that are kept; the one unused for longest goes first. A large vocabulary takes about 100 MB.
        fetch_timeout_s: Longest wait for a document, in seconds.
    """

    def __init__(self, catalog: Catalog, executor: Executor, *, capacity: int, fetch_timeout_s: float) -> None:
        self._catalog = catalog
        self._executor = executor
        self._capacity = capacity
        self._fetch_timeout_s = fetch_timeout_s
        self._codecs: OrderedDict[str, TextCodec] = OrderedDict()
        self._fetches: dict[str, asyncio.Task[TextCodec]] = {}

    def cached(self, engine: EngineProfile) -> TextCodec | None:
        """Returns the codec of an engine where it is here already."""
        codec = self._codecs.get(engine.tokenizer_sha256)
        if codec is not None:
            self._codecs.move_to_end(engine.tokenizer_sha256)
        return codec

    async def codec(self, engine: EngineProfile) -> TextCodec:
        """Returns the codec of an engine; calls that need the same document share one fetch.

        Raises:
            UnavailableError: the document could not be fetched now.
            FailedPreconditionError: what the engine carries is no tokenizer.
        """
        codec = self.cached(engine)
        if codec is not None:
            return codec
        digest = engine.tokenizer_sha256
        fetch = self._fetches.get(digest)
        if fetch is None:
            fetch = asyncio.create_task(self._fetch(engine))
            self._fetches[digest] = fetch
            fetch.add_done_callback(lambda _: self._fetches.pop(digest, None))
        # One caller that goes away must not take the document from the others.
        return await asyncio.shield(fetch)

    async def encode(self, codec: TextCodec, texts: Sequence[str]) -> list[TokenArray | None]:
        """Tokenizes texts, in order, off the event loop where they are long."""
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return codec.encode(texts)
        return await asyncio.get_running_loop().run_in_executor(self._executor, codec.encode, texts)

    async def close(self) -> None:
        """Ends what is being fetched."""
        fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)

    async def _fetch(self, engine: EngineProfile) -> TextCodec:
        try:
            async with asyncio.timeout(self._fetch_timeout_s):
                document = await self._catalog.fetch_file(engine.digest, engine.tokenizer_path)
        except TimeoutError:
            raise UnavailableError(
                f"the tokenizer of engine {engine.engine_id} did not arrive within {self._fetch_timeout_s:g} s",
                metadata={"engine_id": engine.engine_id},
                retry_after_s=1.0,
            ) from None
        digest = hashlib.sha256(document).hexdigest()
        if digest != engine.tokenizer_sha256:
            raise FailedPreconditionError(
                f"the tokenizer of engine {engine.engine_id} has SHA-256 {digest}, its contract says "
                f"{engine.tokenizer_sha256}",
                metadata={"engine_id": engine.engine_id},
            )
        try:
            codec = await asyncio.get_running_loop().run_in_executor(self._executor, TextCodec, document)
        except ValueError as error:
            raise FailedPreconditionError(
                f"engine {engine.engine_id} carries {engine.tokenizer_path}, which is {error}",
                metadata={"engine_id": engine.engine_id},
            ) from error
        self._codecs[engine.tokenizer_sha256] = codec
        while len(self._codecs) > self._capacity:
            self._codecs.popitem(last=False)
        return codec


def _is_byte_level(form: dict[str, Any]) -> bool:
    decoder = form.get("decoder") or {}
    return decoder.get("type") == "ByteLevel"
