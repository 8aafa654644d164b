# SPDX-License-Identifier: Apache-2.0
"""The verdict: one field broken at a time, everything at once, and the same for everybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ifabric.engine.v1 import contract_pb2, node_pb2
from ifabric.worker.v1 import worker_service_pb2
from services.common.contract import Finding
from services.common.errors import DeadlineExceededError
from services.provisioner import verdict
from services.provisioner.wording import field_label
from tests.provisioner import made

if TYPE_CHECKING:
    from collections.abc import Callable


def paths(findings: list[Finding]) -> list[str]:
    return [finding.path for finding in findings]


@pytest.mark.parametrize("payload", [False, True])
def test_a_node_that_agrees_has_no_findings(payload: bool) -> None:
    node = made.description(payload=payload)
    assert verdict.identity(node) == []
    assert verdict.description(node) == []
    assert verdict.agreement(node) == []
    assert verdict.report(node, made.report(node)) == []
    assert verdict.probe(node, made.report(node), made.answer(node)) == []


def test_an_absent_token_budget_is_named() -> None:
    node = made.description()
    node.contract.limits.ClearField("step_token_budget")
    (finding,) = verdict.description(node)
    assert finding.path == "contract.limits.step_token_budget"
    assert finding.found == "absent"
    assert "integer" in finding.expected


def test_zero_is_not_absent() -> None:
    node = made.description()
    node.contract.limits.step_token_budget = 0
    assert [f.found for f in verdict.description(node) if f.path == "contract.limits.step_token_budget"] == ["0"]


def test_everything_that_is_absent_is_found_at_once() -> None:
    node = node_pb2.NodeDescription(node_id="n", incarnation="i", address="h:1")
    found = paths(verdict.description(node))
    assert {
        "engine_digest",
        "suite_version",
        "protocol_revision",
        "contract.limits.step_token_budget",
        "contract.limits.slots",
        "contract.model.vocab_size",
        "contract.card.family",
        "card.family",
        "card.compute_capability",
        "card.memory_bytes",
        "card.count",
    } <= set(found)
    assert len(found) == len(set(found))


def test_what_the_worker_read_explains_what_is_absent() -> None:
    node = made.description()
    node.contract.limits.ClearField("slots")
    node.findings.add(path="limits.slots", found='"16"', expected="integer from 1 to 65536")
    node.findings.add(path="limits.colour", found='"red"', expected="no such field")
    assert verdict.description(node) == [
        Finding("contract.limits.slots", '"16"', "integer from 1 to 65536"),
        Finding("contract.limits.colour", '"red"', "no such field"),
    ]


def test_a_directory_that_holds_no_engine_is_named_as_a_whole() -> None:
    node = made.description()
    node.engine_digest = ""
    node.contract.Clear()
    node.findings.add(path="", found="nothing", expected="contract.json")
    assert verdict.description(node) == [
        Finding("engine_digest", "absent", "64 lower-case hexadecimal digits"),
        Finding("engine", "nothing", "contract.json"),
    ]


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("node_id", "", "node_id"),
        ("node_id", "Node", "node_id"),
        ("node_id", "-n", "node_id"),
        ("node_id", "n" * 129, "node_id"),
        ("incarnation", "", "incarnation"),
        ("incarnation", "i" * 65, "incarnation"),
        ("address", "", "address"),
        ("address", "host", "address"),
        ("address", "host:0", "address"),
        ("address", "host:99999", "address"),
    ],
)
def test_a_node_that_cannot_be_listed_says_which_field(field: str, value: str, path: str) -> None:
    node = made.description()
    setattr(node, field, value)
    assert paths(verdict.identity(node)) == [path]


@pytest.mark.parametrize(
    ("change", "path", "expected"),
    [
        (lambda n: setattr(n, "engine_digest", "ABC"), "engine_digest", "64 lower-case"),
        (lambda n: setattr(n, "protocol_revision", 7), "protocol_revision", "1"),
        (lambda n: setattr(n, "suite_version", ""), "suite_version", "version"),
        (lambda n: n.card.ClearField("count"), "card.count", "what the node's card says"),
        (lambda n: setattr(n.card, "memory_bytes", 0), "card.memory_bytes", "at least 1"),
        (
            lambda n: setattr(n.contract.limits, "step_token_budget", 513),
            "contract.limits.step_token_budget",
            "at most limits.built_step_token_budget",
        ),
        (lambda n: n.card.compute_capability.Clear(), "card.compute_capability", "card says"),
    ],
)
def test_one_wrong_field_is_one_finding(
    change: Callable[[node_pb2.NodeDescription], object],
    path: str,
    expected: str,
) -> None:
    node = made.description()
    change(node)
    (finding,) = verdict.description(node)
    assert finding.path == path
    assert expected in finding.expected


@pytest.mark.parametrize(
    ("change", "path", "found", "expected"),
    [
        (lambda n: setattr(n.card, "family", "nvidia-h200"), "card.family", "nvidia-h200", "cpu, as contract"),
        (
            lambda n: setattr(n.card.compute_capability, "value", "9.0"),
            "card.compute_capability",
            "9.0",
            "not_applicable",
        ),
        (lambda n: setattr(n.card, "memory_bytes", 1_000), "card.memory_bytes", "1000", "at least 1500000000"),
        (lambda n: setattr(n.contract.card, "count", 4), "card.count", "1", "at least 4"),
    ],
)
def test_a_card_that_falls_short_disagrees(
    change: Callable[[node_pb2.NodeDescription], object],
    path: str,
    found: str,
    expected: str,
) -> None:
    node = made.description()
    change(node)
    (finding,) = verdict.agreement(node)
    assert (finding.path, finding.found) == (path, found)
    assert finding.expected.startswith(expected)


@pytest.mark.parametrize(
    ("change", "path", "found", "expected"),
    [
        (
            lambda r: setattr(r, "engine_digest", "f" * 64),
            "engine_digest",
            "f" * 64,
            f"{made.DIGEST}, as engine_digest says",
        ),
        (lambda r: setattr(r, "vocab_size", 1), "vocab_size", "1", "49152, as contract.model.vocab_size says"),
        (lambda r: setattr(r, "hidden_size", 1), "hidden_size", "1", "576, as contract.model.hidden_size says"),
        (lambda r: setattr(r, "layers", 1), "layers", "1", "30, as contract.model.layers says"),
        (
            lambda r: setattr(r.limits, "step_token_budget", 256),
            "limits.step_token_budget",
            "256",
            "512, as contract.limits.step_token_budget says",
        ),
        (lambda r: r.limits.ClearField("slots"), "limits.slots", "absent", "16, as contract.limits.slots says"),
        (
            lambda r: setattr(r.limits.kv_block_tokens, "value", 32),
            "limits.kv_block_tokens",
            "32",
            "64, as contract.limits.kv_block_tokens says",
        ),
        (
            lambda r: setattr(r.capabilities, "scoring", False),
            "capabilities.scoring",
            "false",
            "true, as contract.capabilities.scoring says",
        ),
        (
            lambda r: r.capabilities.guided_decoding.append(contract_pb2.GUIDE_KIND_REGEX),
            "capabilities.guided_decoding",
            "[grammar, json_schema, regex]",
            "[grammar, json_schema], as contract.capabilities.guided_decoding says",
        ),
        (
            lambda r: setattr(r, "kv_pool_blocks", 1),
            "kv_pool_blocks",
            "1",
            "at least 20: blocks of 64 tokens for one sequence of 1280",
        ),
    ],
)
def test_a_report_that_says_something_else_is_found(
    change: Callable[[node_pb2.EngineReport], object],
    path: str,
    found: str,
    expected: str,
) -> None:
    node = made.description()
    loaded = made.report(node)
    change(loaded)
    assert verdict.report(node, loaded) == [Finding(f"loaded.{path}", found, expected)]


def test_the_order_of_capabilities_says_nothing() -> None:
    node = made.description()
    loaded = made.report(node)
    kinds = list(reversed(loaded.capabilities.guided_decoding))
    loaded.capabilities.guided_decoding[:] = kinds
    assert verdict.report(node, loaded) == []


def test_an_engine_without_cache_has_no_pool() -> None:
    node = made.description()
    node.contract.limits.kv_block_tokens.not_applicable = True
    loaded = made.report(node)
    assert verdict.report(node, loaded) == []
    loaded.kv_pool_blocks = 3
    assert verdict.report(node, loaded) == [Finding("loaded.kv_pool_blocks", "3", "0, since the engine has no cache")]


@pytest.mark.parametrize(
    ("payload", "change", "path"),
    [
        (False, lambda a: setattr(a.report, "layers", 1), "probe.report.layers"),
        (False, lambda a: setattr(a.report, "load_ms", 1), "probe.report"),
        (False, lambda a: setattr(a.usage, "prompt_tokens", 0), "probe.usage.prompt_tokens"),
        (False, lambda a: setattr(a.usage, "prompt_tokens", 1_025), "probe.usage.prompt_tokens"),
        (False, lambda a: setattr(a.usage, "cached_tokens", 4), "probe.usage.cached_tokens"),
        (False, lambda a: setattr(a.usage, "computed_tokens", 0), "probe.usage.computed_tokens"),
        (False, lambda a: setattr(a.usage, "generated_tokens", 0), "probe.usage.generated_tokens"),
        (False, lambda a: setattr(a.usage, "generated_tokens", 257), "probe.usage.generated_tokens"),
        (False, lambda a: setattr(a, "payload_bytes", 12), "probe.payload"),
        (True, lambda a: setattr(a.usage, "generated_tokens", 1), "probe.usage.generated_tokens"),
        (True, lambda a: setattr(a.payload, "not_applicable", True), "probe.payload"),
        (True, lambda a: setattr(a.payload.value, "dtype", contract_pb2.PAYLOAD_DTYPE_BFLOAT16), "probe.payload.dtype"),
        (True, lambda a: a.payload.value.layers.append(3), "probe.payload.layers"),
        (True, lambda a: a.payload.value.shape.append(2), "probe.payload.shape"),
        (True, lambda a: setattr(a, "payload_bytes", a.payload_bytes - 1), "probe.payload_bytes"),
    ],
)
def test_a_probe_that_brings_something_else_is_found(
    payload: bool,
    change: Callable[[worker_service_pb2.ProbeResponse], object],
    path: str,
) -> None:
    node = made.description(payload=payload)
    answer = made.answer(node)
    change(answer)
    assert path in paths(verdict.probe(node, made.report(node), answer))


def test_a_probe_without_answer_says_what_came_instead() -> None:
    (finding,) = verdict.unanswered("10.0.0.1:7", DeadlineExceededError("25 s are over"))
    assert finding == Finding("probe", "DEADLINE: 25 s are over", "an answer of WorkerService.Probe at 10.0.0.1:7")


def test_every_path_is_a_label_that_metrics_know() -> None:
    bare = node_pb2.NodeDescription()
    bare.contract.files.add()
    bare.contract.capabilities.payload.value.shape.append(0)
    found = verdict.identity(bare) + verdict.description(bare)
    for payload in (False, True):
        node = made.description(payload=payload)
        node.contract.card.count = 99
        node.card.memory_bytes = 1
        node.card.family = "other"
        node.card.compute_capability.value = "1.0"
        found += verdict.agreement(node) + verdict.report(node, node_pb2.EngineReport(kv_pool_blocks=-1))
        answer = worker_service_pb2.ProbeResponse(payload_bytes=3)
        answer.payload.value.shape.append(1)
        answer.usage.generated_tokens = 7_000
        answer.usage.cached_tokens = 9
        found += verdict.probe(node, made.report(node), answer)
    assert len({finding.path for finding in found}) > 60
    assert {finding.path for finding in found if field_label(finding.path) == "other"} == set()
    assert field_label("contract.files[3].sha256") == "contract.files.sha256"
    assert field_label("contract.limits.colour") == "other"
    assert field_label("engine") == "engine"


def test_two_provisioners_agree() -> None:
    node = made.description()
    node.contract.limits.ClearField("step_token_budget")
    node.card.memory_bytes = 1
    again = node_pb2.NodeDescription.FromString(node.SerializeToString())
    assert verdict.description(node) + verdict.agreement(node) == verdict.description(again) + verdict.agreement(again)
