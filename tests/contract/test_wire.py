# SPDX-License-Identifier: Apache-2.0
"""Contracts on the wire: the same names as the document, presence for every number, flaws carried along."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ifabric.engine.v1 import contract_pb2
from services.common import contract, schema
from services.common.contract import wire
from services.common.contract.values import Contract
from services.common.errors import InvalidArgumentError
from services.common.schema import nodes
from tests.contract import documents, mutations

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

GOOD = documents.all_good()


def proto_of(plain: documents.Plain) -> contract_pb2.EngineContract:
    findings = schema.Findings()
    document = schema.read_document(json.dumps(plain).encode(), findings)
    assert findings.all == []
    return contract.from_document(document)


def test_schema_and_proto_have_the_same_fields() -> None:
    compare(schema.named("contract").root, contract_pb2.EngineContract.DESCRIPTOR, "")


def compare(node: nodes.Node, message: Descriptor, at: str) -> None:
    assert isinstance(node, nodes.ObjectNode)
    assert list(node.properties) == [field.name for field in message.fields], at
    for field in message.fields:
        inner, where = node.properties[field.name], f"{at}{field.name}"
        assert field.is_repeated == isinstance(inner, nodes.ListNode), where
        if isinstance(inner, nodes.ListNode):
            inner = inner.items
        else:
            assert field.has_presence or field.enum_type is not None, where
        kind: Any = field
        if field.message_type is not None and wire.is_maybe(field.message_type):
            assert inner.may_not_apply, where
            assert [part.name for part in field.message_type.fields] == ["value", "not_applicable"]
            kind = field.message_type.fields_by_name["value"]
        else:
            assert not inner.may_not_apply, where
        compare_kind(inner, kind, where)


def compare_kind(node: nodes.Node, field: Any, where: str) -> None:
    match node:
        case nodes.ObjectNode():
            compare(node, field.message_type, f"{where}.")
        case nodes.IntegerNode():
            bits = {field.TYPE_INT32: 31, field.TYPE_INT64: 63}[field.type]
            assert -(1 << bits) <= node.minimum <= node.maximum < 1 << bits, where
        case nodes.RealNode():
            assert field.type == field.TYPE_DOUBLE, where
        case nodes.BooleanNode():
            assert field.type == field.TYPE_BOOL, where
        case nodes.TextNode(words=(_, *_)):
            numbers = [value.number for value in field.enum_type.values if value.number]
            assert node.words == tuple(wire.word_of(field.enum_type, number) for number in numbers), where
        case _:
            assert field.type == field.TYPE_STRING, where


@pytest.mark.parametrize("good", GOOD, ids=lambda good: good["engine_id"])
def test_a_good_contract_goes_to_the_wire_and_back_exactly(good: documents.Plain) -> None:
    proto = proto_of(good)
    assert contract.check(proto) == []
    assert json.loads(contract.to_json(proto)) == good
    sent = contract_pb2.EngineContract.FromString(proto.SerializeToString())
    assert contract.from_document(contract.to_document(sent)) == proto
    values = Contract.from_proto(sent)
    assert values.to_proto() == proto
    assert values.limits.step_token_budget == good["limits"]["step_token_budget"]


def test_values_say_not_applicable_as_none_and_size_their_payload() -> None:
    values = Contract.from_proto(proto_of(documents.card_set()))
    assert values.limits.kv_block_tokens is None
    assert values.model.kv_cache_dtype is None
    assert values.capabilities.payload is not None
    assert values.capabilities.payload.size_bytes == 2 * 4096 * 2
    assert Contract.from_proto(proto_of(documents.generation())).capabilities.payload is None
    fraction = Contract.from_proto(proto_of(documents.with_cache_fraction())).limits.kv_cache_memory_fraction
    assert fraction == 0.85


def test_an_absent_budget_is_absent_and_said() -> None:
    plain = documents.generation()
    del plain["limits"]["step_token_budget"]
    proto = proto_of(plain)
    assert not proto.limits.HasField("step_token_budget")
    says = "limits.step_token_budget: absent, expected integer from 1 to 16777216"
    assert [str(finding) for finding in contract.check(proto)] == [says]
    with pytest.raises(InvalidArgumentError, match=says) as raised:
        Contract.from_proto(proto)
    assert [violation.field for violation in raised.value.violations] == ["limits.step_token_budget"]


def test_a_zero_budget_is_another_flaw_than_an_absent_one() -> None:
    proto = proto_of(documents.changed(documents.generation(), "limits.step_token_budget", 0))
    assert proto.limits.HasField("step_token_budget")
    assert "limits.step_token_budget: 0, expected integer from 1 to 16777216" in map(str, contract.check(proto))


@pytest.mark.parametrize("field", ["kv_block_tokens", "kv_cache_memory_fraction"])
def test_not_applicable_is_never_false_and_never_empty(field: str) -> None:
    proto = proto_of(documents.generation())
    getattr(proto.limits, field).not_applicable = False
    assert [(f.path, f.found) for f in contract.check(proto)] == [(f"limits.{field}", "false")]
    getattr(proto.limits, field).Clear()
    assert [(f.path, f.found) for f in contract.check(proto)] == [(f"limits.{field}", "absent")]


def test_enum_numbers_that_nobody_knows_are_findings() -> None:
    proto = proto_of(documents.hidden_states())
    proto.capabilities.payload.value.ClearField("dtype")
    assert [(f.path, f.found) for f in contract.check(proto)] == [("capabilities.payload.dtype", "absent")]
    received = contract_pb2.EngineContract.FromString(
        proto.SerializeToString() + contract_pb2.EngineContract(
            capabilities=contract_pb2.EngineCapabilities(
                payload=contract_pb2.MaybePayload(value=contract_pb2.PayloadForm(dtype=77)))  # type: ignore[arg-type]
        ).SerializeToString())  # fmt: skip
    assert [(f.path, f.found) for f in contract.check(received)] == [("capabilities.payload.dtype", '"77"')]


def test_mutated_contracts_keep_their_flaws_on_the_wire() -> None:
    """What reading finds is found again from the wire form and the findings that travel with it."""
    for label, text in mutations.mutated(documents.all_good(), seed=5, each=20):
        findings = schema.Findings()
        document = schema.read_document(text, findings)
        if document is not schema.ABSENT:
            schema.named("contract").check(document, findings)
        proto = contract.from_document(document)
        carried = set(contract.check(proto))
        travelling = [finding for finding in findings.all if finding not in carried]
        together = contract.all_findings(proto, travelling)
        assert set(findings.all) <= set(together), label
        assert bool(together) == bool(findings.all), label


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("not_applicable"),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from([*documents.generation(), "slots", "value", "path"]), inner, max_size=4),
    max_leaves=20))  # fmt: skip
def test_any_document_has_a_wire_form(document: Any) -> None:
    proto = contract.from_document(document)
    contract.check(contract_pb2.EngineContract.FromString(proto.SerializeToString()))
