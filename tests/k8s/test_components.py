# SPDX-License-Identifier: Apache-2.0
"""Objects of other people's operators: Prometheus', KEDA's, cert-manager's; and autoscaling. Offline."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml

from services.common.telemetry import names
from tests.k8s.cluster import render
from tests.support.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

Object = dict[str, Any]

RULES = ROOT / "deploy" / "observability" / "prometheus" / "ifabric.rules.yaml"
FIGURE = "ifabric:queue_depth:tier"
"""What autoscalers look at, by tier."""

TEXT = {"type": "string", "minLength": 1}
NAMED = {"type": "object", "required": ["name"], "properties": {"name": TEXT}}


def closed(required: Object, optional: Object | None = None) -> Object:
    """A schema of an object with exactly these fields."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": list(required), "properties": properties, "additionalProperties": False}


DURATION = {"type": "string", "pattern": "^[0-9]+[smh]$"}
SCHEMAS: dict[str, tuple[str, Object]] = {
    "PodMonitor": (
        "monitoring.coreos.com/v1",
        closed(
            {
                "selector": closed({"matchLabels": {"type": "object", "minProperties": 1}}),
                "podMetricsEndpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": closed(
                        {"port": TEXT, "interval": DURATION},
                        {"relabelings": {"type": "array", "items": closed(
                            {"targetLabel": TEXT},
                            {"replacement": TEXT, "sourceLabels": {"type": "array", "items": TEXT}},
                        )}},
                    ),
                },
            }
        ),
    ),
    "PrometheusRule": ("monitoring.coreos.com/v1", closed({"groups": {"type": "array", "minItems": 1}})),
    "ScaledObject": (
        "keda.sh/v1alpha1",
        closed(
            {
                "scaleTargetRef": NAMED,
                "minReplicaCount": {"type": "integer", "minimum": 1},
                "maxReplicaCount": {"type": "integer", "minimum": 1},
                "pollingInterval": {"type": "integer"},
                "cooldownPeriod": {"type": "integer"},
                "advanced": {"type": "object"},
                "triggers": {"type": "array", "minItems": 1, "items": closed(
                    {"type": {"const": "prometheus"},
                     "metadata": closed({"serverAddress": TEXT, "query": TEXT, "threshold": TEXT})}
                )},
            }
        ),
    ),
    "Certificate": (
        "cert-manager.io/v1",
        closed(
            {
                "secretName": TEXT,
                "commonName": TEXT,
                "dnsNames": {"type": "array", "minItems": 1, "items": TEXT},
                "usages": {"type": "array", "items": {"enum": ["server auth", "client auth"]}},
                "duration": DURATION,
                "renewBefore": DURATION,
                "privateKey": closed(
                    {"algorithm": TEXT, "size": {"type": "integer"}, "encoding": TEXT, "rotationPolicy": TEXT}
                ),
                "issuerRef": closed({"name": TEXT, "kind": TEXT, "group": TEXT}),
            }
        ),
    ),
}  # fmt: skip
"""What of each kind is used here, as its operator names it: a field that is misspelt is refused."""
OF_OPERATORS = {version for version, _ in SCHEMAS.values()}
"""What Kubernetes itself does not know."""


@pytest.fixture(scope="module", params=["h200", "consumer-cards"])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """What an overlay for cards makes."""
    return render(request.param)


def of(objects: list[Object], kind: str) -> Iterator[Object]:
    yield from (each for each in objects if each["kind"] == kind)


def test_objects_of_operators_have_their_form(objects: list[Object]) -> None:
    for kind, (version, schema) in SCHEMAS.items():
        for each in of(objects, kind):
            assert each["apiVersion"] == version
            jsonschema.validate(each["spec"], schema)


def test_every_service_is_scraped_under_the_name_that_alerts_know(objects: list[Object]) -> None:
    named = set(re.findall(r"ifabric-[a-z]+", RULES.read_text()))
    scraped = set()
    templates = [each["spec"]["template"] for each in of(objects, "Deployment")]
    for monitor in of(objects, "PodMonitor"):
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        scraped |= {each["replacement"] for each in endpoint["relabelings"] if each["targetLabel"] == "job"}
        wanted = monitor["spec"]["selector"]["matchLabels"]
        matching = [each for each in templates if wanted.items() <= each["metadata"]["labels"].items()]
        assert matching
        for template in matching:
            ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
            assert ports[endpoint["port"]] == 9600
    assert scraped == named == {"ifabric-broker", "ifabric-provisioner", "ifabric-worker"}


def test_the_alerts_are_those_of_the_rule_file(objects: list[Object]) -> None:
    [rule] = of(objects, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text()), "run scripts/kube/rules"


def test_the_figure_of_a_tier_is_made_of_metrics_that_there_are() -> None:
    [rule] = re.findall(r"record: ifabric:queue_depth:tier\n +expr: >-\n((?: {10}.+\n)+)", RULES.read_text())
    exported = {metric.name.replace(".", "_"): metric for metric in names.all_metrics()}
    figures = [exported[name] for name in re.findall(r"ifabric_\w+", rule)]
    assert figures == [names.BROKER_QUEUE_DEPTH, names.ENGINE_ACTIVE]
    assert all("engine" in metric.labels for metric in figures)


def test_the_adapter_serves_the_figure_under_the_name_that_autoscalers_ask_for() -> None:
    document = yaml.safe_load((ROOT / "deploy/observability/prometheus-adapter/ifabric.yaml").read_text())
    [rule] = document["externalRules"]
    assert rule["seriesQuery"] == FIGURE
    assert re.sub(rule["name"]["matches"], rule["name"]["as"], FIGURE) == "ifabric_tier_queue_depth"


def test_tiers_grow_with_the_requests_that_wait_for_their_engines(objects: list[Object]) -> None:
    workers = {each["metadata"]["name"] for each in of(objects, "Deployment")}
    scaled: list[str] = []
    for each in of(objects, "ScaledObject"):
        [trigger] = each["spec"]["triggers"]
        assert trigger["metadata"]["query"] == f'sum({FIGURE}{{tier="{each["metadata"]["labels"]["ifabric/tier"]}"}})'
        assert each["spec"]["minReplicaCount"] <= each["spec"]["maxReplicaCount"]
        scaled.append(each["spec"]["scaleTargetRef"]["name"])
    for each in of(objects, "HorizontalPodAutoscaler"):
        [figure] = each["spec"]["metrics"]
        assert figure["external"]["metric"] == {
            "name": "ifabric_tier_queue_depth",
            "selector": {"matchLabels": {"tier": each["metadata"]["labels"]["ifabric/tier"]}},
        }
        scaled.append(each["spec"]["scaleTargetRef"]["name"])
    assert scaled
    assert len(set(scaled)) == len(scaled), "two autoscalers would fight over a tier"
    assert set(scaled) <= workers
    fixed = {each["metadata"]["name"] for each in of(objects, "Deployment") if "replicas" in each["spec"]}
    assert not fixed & set(scaled), "whoever applies the overlay would undo what was scaled"
    assert workers - set(scaled) <= fixed


def test_cert_manager_writes_every_certificate_that_pods_mount(objects: list[Object]) -> None:
    made = {each["spec"]["secretName"]: each["spec"]["dnsNames"] for each in of(objects, "Certificate")}
    mounted = {
        volume["secret"]["secretName"]
        for each in of(objects, "Deployment")
        for volume in each["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "tls"
    }
    assert made == {secret: [f"{secret.removesuffix('-tls')}.ifabric"] for secret in mounted}
