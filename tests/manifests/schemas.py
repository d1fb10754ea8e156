"""Every document against a strict schema: Kubernetes' own types at one version (package kubernetes-validate), and extracts of three custom
resources. It knows no rule beyond types."""

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

KUBERNETES = files("kubernetes_validate") / "kubernetes-json-schema" / "v1.37.0-local-strict"
OWN = {
    "RayService": "rayservice.schema.json",
    "PodMonitor": "podmonitor.schema.json",
    "PrometheusRule": "prometheusrule.schema.json",
}


def type_problems(document: dict) -> Iterator[str]:
    """What the API server would refuse of one document, or drop silently: path and reason."""
    kind = document.get("kind", "")
    validator = _validator(kind, document.get("apiVersion", ""))
    if validator is None:
        yield f"unknown kind: {kind} of {document.get('apiVersion')}"
        return
    for error in validator.iter_errors(document):
        yield f"{kind} {'.'.join(map(str, error.absolute_path))}: {error.message[-300:]}"


@cache
def _validator(kind: str, version: str) -> Draft202012Validator | None:
    group, slash, number = version.rpartition("/")
    file: Any = (
        Path(__file__).parent / OWN[kind]
        if kind in OWN
        else KUBERNETES / f"{kind.lower()}-{group.partition('.')[0]}{'-' if slash else ''}{number}.json"
    )
    if not file.is_file():
        return None
    schema = json.loads(file.read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema, registry=_types())


@cache
def _types() -> Registry:
    return Resource.from_contents(json.loads((KUBERNETES / "_definitions.json").read_text())) @ Registry()
