# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from ifabric.engine.v1 import generation_pb2
from services.common.errors import InvalidArgumentError
from services.worker.credit import Amount
from services.worker.items import item_from_wire
from tests.worker.made import Heard, packed, work


def test_items_of_one_job_share_their_options() -> None:
    first, second = (item_from_wire(work(handle, max_tokens=7), handle, Heard(), 0) for handle in (1, 2))
    other = item_from_wire(work(3, max_tokens=8), 3, Heard(), 0)
    assert first.request.options is second.request.options
    assert other.request.options is not first.request.options


def test_absent_sampling_fields_take_the_values_that_the_proto_states() -> None:
    options = item_from_wire(work(1), 1, Heard(), 0).request.options
    assert (options.temperature, options.top_k, options.top_p, options.min_p) == (0.0, 0, 1.0, 0.0)
    assert (options.repetition_penalty, options.presence_penalty, options.frequency_penalty) == (1.0, 0.0, 0.0)
    assert options.seed == 0


def test_every_field_of_sampling_arrives() -> None:
    sampling = generation_pb2.SamplingParameters(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, repetition_penalty=2.0, presence_penalty=-1.0,
        frequency_penalty=1.5, seed=2**64 - 1,
    )  # fmt: skip
    options = item_from_wire(work(1, sampling=sampling), 1, Heard(), 0).request.options
    for field, value in sampling.ListFields():
        assert getattr(options, field.name) == value


def test_an_item_costs_its_prompt_its_output_and_its_payload() -> None:
    wanted = item_from_wire(work(1, range(10), max_tokens=5, samples=3), 1, Heard(), 8192)
    unwanted = item_from_wire(work(1, range(10), max_tokens=5, samples=3, return_payload=False), 1, Heard(), 8192)
    assert wanted.cost == Amount(25, 3, 8192)
    assert unwanted.cost == Amount(25, 3, 0)


def test_what_number_types_cannot_carry_is_refused_all_at_once() -> None:
    broken = work(1, max_tokens=-1, samples=0, head_ends=[4, -2])
    with pytest.raises(InvalidArgumentError) as caught:
        item_from_wire(broken, 1, Heard(), 0)
    assert [(violation.field, violation.description) for violation in caught.value.violations] == [
        ("max_tokens", "-1, and the least is 0"),
        ("samples", "0, and the least is 1"),
        ("head_ends[1]", "-2, and the least is 1"),
    ]


def test_half_a_token_is_refused() -> None:
    broken = work(1)
    broken.token_ids = packed([1, 2])[:-1]
    with pytest.raises(InvalidArgumentError, match="7 bytes are not a whole number"):
        item_from_wire(broken, 1, Heard(), 0)
