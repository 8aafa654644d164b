# SPDX-License-Identifier: Apache-2.0
"""Text to ids: the engine's own tokenizer, fetched once, and text that it cannot represent."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from services.broker.frontdoor.selection import EngineProfile
from services.broker.frontdoor.tokenization import INLINE_CHARACTERS, CodecStore, TextCodec
from services.common.errors import FailedPreconditionError, UnavailableError
from tests.broker_front.fakes import ShelfCatalog
from tests.broker_front.made import byte_fallback, byte_level, contract, ids_of
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from services.broker.work import TokenArray


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def profile(catalog: ShelfCatalog) -> EngineProfile:
    return EngineProfile.of(catalog.engines()[0])


def store(catalog: ShelfCatalog, executor: ThreadPoolExecutor, *, capacity: int = 2, wait_s: float = 5) -> CodecStore:
    return CodecStore(catalog, executor, capacity=capacity, fetch_timeout_s=wait_s)


def test_ids_are_the_tokenizers_own() -> None:
    texts = ["The quick fox", "Grüße 聪明 👩‍🚀", "a"]
    encoded = TextCodec(byte_level()).encode(texts)
    assert [tokens.tolist() for tokens in encoded if tokens is not None] == [ids_of(byte_level(), t) for t in texts]


def test_text_without_tokens_is_not_represented() -> None:
    # U+0120 is how the alphabet writes a space: this vocabulary has no token for one.
    codec = TextCodec(byte_level(without="Ġ"))
    good, lossy = codec.encode(["fox", "a fox"])
    assert good is not None
    assert lossy is None


def test_text_that_spells_a_special_token_is_that_token() -> None:
    (tokens,) = TextCodec(byte_level()).encode(["fox<|start|>"])
    assert tokens is not None
    special = Tokenizer.from_buffer(byte_level()).token_to_id("<|start|>")
    assert tokens.tolist() == [*ids_of(byte_level(), "fox"), special]


def test_a_token_put_in_front_is_no_difference() -> None:
    (tokens,) = TextCodec(byte_level(beginning=True)).encode(["fox"])
    assert tokens is not None
    assert tokens.tolist() == ids_of(byte_level(beginning=True), "fox")


def test_other_tokenizers_lose_what_becomes_the_unknown_token() -> None:
    (whole,) = TextCodec(byte_fallback()).encode(["the fox"])
    assert whole is not None
    document = json.loads(byte_fallback())
    document["model"]["byte_fallback"] = False
    (lossy,) = TextCodec(json.dumps(document).encode()).encode(["the fox 聪"])
    assert lossy is None


def test_a_document_cannot_cut_or_pad_prompts() -> None:
    document = json.loads(byte_level())
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {
        "strategy": {"Fixed": 50},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|end|>",
    }
    (tokens,) = TextCodec(json.dumps(document).encode()).encode(["The quick brown fox"])
    assert tokens is not None
    assert tokens.tolist() == ids_of(byte_level(), "The quick brown fox")


async def test_a_document_is_fetched_once_for_all(executor: ThreadPoolExecutor) -> None:
    catalog = ShelfCatalog()
    catalog.put(contract(), byte_level())
    codecs = store(catalog, executor)
    catalog.reachable.clear()
    calls = [asyncio.create_task(codecs.codec(profile(catalog))) for _ in range(8)]
    await asyncio.sleep(0)
    calls[0].cancel()  # one that goes away takes nothing from the others
    catalog.reachable.set()
    got = await asyncio.gather(*calls[1:])
    assert len(set(map(id, got))) == 1
    assert len(catalog.fetches) == 1
    assert codecs.cached(profile(catalog)) is got[0]


async def test_a_document_that_does_not_arrive_is_unavailable_and_asked_for_again(executor: ThreadPoolExecutor) -> None:
    catalog = ShelfCatalog()
    catalog.put(contract(), byte_level())
    catalog.reachable.clear()
    codecs = store(catalog, executor, wait_s=0.05)
    with pytest.raises(UnavailableError, match="did not arrive") as caught:
        await codecs.codec(profile(catalog))
    assert caught.value.retry_after_s
    catalog.reachable.set()
    assert await codecs.codec(profile(catalog)) is codecs.cached(profile(catalog))


async def test_a_document_with_another_digest_is_refused(executor: ThreadPoolExecutor) -> None:
    catalog = ShelfCatalog()
    catalog.put(contract(byte_level()), byte_level(size=300))
    with pytest.raises(FailedPreconditionError, match="SHA-256"):
        await store(catalog, executor).codec(profile(catalog))


async def test_what_is_no_tokenizer_is_refused(executor: ThreadPoolExecutor) -> None:
    catalog = ShelfCatalog()
    made = contract()
    made.files[0].sha256 = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # of {}
    catalog.put(made, b"{}")
    with pytest.raises(FailedPreconditionError, match="not a tokenizer document"):
        await store(catalog, executor).codec(profile(catalog))


async def test_the_codec_unused_for_longest_goes_first(executor: ThreadPoolExecutor) -> None:
    catalog = ShelfCatalog()
    codecs = store(catalog, executor, capacity=2)
    for size in (300, 310, 320):
        catalog.put(contract(byte_level(size=size), engine_id=f"engine-{size}"), byte_level(size=size))
    first, second, third = (EngineProfile.of(engine) for engine in catalog.engines())
    await codecs.codec(first)
    await codecs.codec(second)
    assert codecs.cached(first)
    await codecs.codec(third)
    assert codecs.cached(first)
    assert codecs.cached(second) is None


async def test_long_texts_are_tokenized_off_the_loop_in_order(executor: ThreadPoolExecutor) -> None:
    loop_turned = threading.Event()

    class Patient(TextCodec):
        def encode(self, texts: Sequence[str]) -> list[TokenArray | None]:
            assert loop_turned.wait(PATIENCE_S), "the event loop stood still while a long text was tokenized"
            return super().encode(texts)

    texts = [f"text {index} " * (INLINE_CHARACTERS // 64) for index in range(16)]
    asyncio.get_running_loop().call_soon(loop_turned.set)
    encoded = await store(ShelfCatalog(), executor).encode(Patient(byte_level()), texts)
    assert [tokens.tolist() for tokens in encoded if tokens is not None] == [ids_of(byte_level(), t) for t in texts]


async def test_short_texts_stay_on_the_loop(executor: ThreadPoolExecutor) -> None:
    executor.shutdown()
    (tokens,) = await store(ShelfCatalog(), executor).encode(TextCodec(byte_level()), ["short"])
    assert tokens is not None
