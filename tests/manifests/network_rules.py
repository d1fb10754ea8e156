"""What must hold of NetworkPolicy and PodMonitor: that they name pods and ports that exist, that what is needed gets through, and
that nothing else does."""

from collections.abc import Iterator

import yaml
from cluster_rules import groups, one, ray_container

SECRET = "dflash2-api-keys"


def network_problems(documents: list[dict]) -> Iterator[str]:
    service = one(documents, "RayService")
    if not service:
        return
    for name, group in groups(service).items():
        ports = {port["name"]: port["containerPort"] for port in ray_container(group).get("ports", [])}
        exported = group.get("rayStartParams", {}).get("metrics-export-port")
        if exported is None or ports.get("metrics") != int(exported):
            yield f"{name}: container port `metrics` is {ports.get('metrics')}, but Ray exports on {exported}"
    yield from _policy_problems(documents, service)
    yield from _monitor_problems(documents, service)
    namespaces = {d["metadata"].get("namespace") for d in documents if d["kind"] not in ("PriorityClass",)}
    if len(namespaces) != 1:
        yield f"expected one namespace, got {sorted(map(str, namespaces))}"


def _labels(group: dict) -> dict[str, str]:
    return group["template"].get("metadata", {}).get("labels", {})


def _policy_problems(documents: list[dict], service: dict) -> Iterator[str]:
    policies = [
        document["spec"]
        for document in documents
        if document["kind"] == "NetworkPolicy"
        and all(
            document["spec"]["podSelector"].get("matchLabels", {}).items() <= _labels(group).items()
            for group in groups(service).values()
        )
    ]
    if not policies:
        yield "no NetworkPolicy selects the service's pods"
        return
    if {"Ingress", "Egress"} - {kind for policy in policies for kind in policy.get("policyTypes", [])}:
        yield "the NetworkPolicy does not close both directions"
    rules = [rule for policy in policies for rule in policy.get("ingress", [])]
    for rule in rules:
        if not rule.get("from"):
            yield "a NetworkPolicy rule lets everybody in"
    inside = [rule for rule in rules if any(_selects_all(peer, service) for peer in rule.get("from", []))]
    if not any("ports" not in rule for rule in inside):
        yield "the service's pods cannot reach each other on every port"
    opened = {port["port"] for rule in rules if rule not in inside for port in rule.get("ports", [{"port": None}])}
    if opened != {8000, 8080, 8265}:
        yield f"the NetworkPolicy opens {sorted(map(str, opened))} to others, expected 8000 (clients), 8080 (metrics) and 8265 (operator)"
    outward = [
        port["port"] for policy in policies for rule in policy.get("egress", []) for port in rule.get("ports", [])
    ]
    if 53 not in outward:
        yield "no names: the NetworkPolicy closes port 53"
    if service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions") and 6379 not in outward:
        yield "the NetworkPolicy closes the way to Redis"


def _selects_all(peer: dict, service: dict) -> bool:
    selected = peer.get("podSelector", {}).get("matchLabels", {})
    return (
        bool(selected)
        and "namespaceSelector" not in peer
        and all(selected.items() <= _labels(group).items() for group in groups(service).values())
    )


def _monitor_problems(documents: list[dict], service: dict) -> Iterator[str]:
    config = yaml.safe_load(service["spec"].get("serveConfigV2", "")) or {}
    keyed = any((application.get("args") or {}).get("api_keys_file") for application in config.get("applications", []))
    monitor = one(documents, "PodMonitor")
    if not monitor:
        if keyed:
            yield "no PodMonitor"
        return
    selected = monitor["spec"]["selector"].get("matchLabels", {})
    endpoints = {endpoint["port"]: endpoint for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    for name, group in groups(service).items():
        if not selected or not selected.items() <= _labels(group).items():
            yield f"{name}: the PodMonitor does not select it"
    known = {port["name"] for group in groups(service).values() for port in ray_container(group).get("ports", [])}
    if endpoints.keys() - known:
        yield f"the PodMonitor scrapes ports that no pod has: {sorted(endpoints.keys() - known)}"
    if {"metrics", "serve"} - endpoints.keys():
        yield "the PodMonitor leaves out Ray's metrics or the service's"
    if any(endpoint.get("path", "/metrics") != "/metrics" for endpoint in endpoints.values()):
        yield "the PodMonitor asks for a path other than /metrics"
    if keyed and endpoints.get("serve", {}).get("authorization", {}).get("credentials") != {
        "name": SECRET,
        "key": "metrics",
    }:
        yield "the service's /metrics asks for a key, and the PodMonitor has none"
