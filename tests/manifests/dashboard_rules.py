"""What must hold of the Grafana dashboard: that it imports, that no panel covers another, and that its queries are right."""

import re
from collections.abc import Iterator
from itertools import combinations, pairwise

from exported import Sample
from promql_rules import labels_of, parsed, promql_problems, selectors

ROWS = ["Service", "Speculation", "Pipeline", "Failures"]
VARIABLES = ["datasource", "job", "model_name", "engine"]
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS = 24


def dashboard_problems(dashboard: dict, samples: dict[str, Sample], target_labels: frozenset[str]) -> Iterator[str]:
    missing = {"uid", "title", "schemaVersion", "templating", "panels", "time"} - dashboard.keys()
    if missing:
        yield f"the dashboard has no {sorted(missing)}"
        return
    if "id" in dashboard or dashboard["schemaVersion"] < 38:  # 38: Grafana 10
        yield "the dashboard has an id of some Grafana, or is older than Grafana 10"
    yield from _variable_problems(dashboard["templating"]["list"], samples, target_labels)
    yield from _grid_problems(dashboard["panels"])
    for panel in dashboard["panels"]:
        if panel["type"] != "row":
            for problem in _panel_problems(panel, samples, target_labels):
                yield f"panel {panel['title']!r}: {problem}"


def _variable_problems(
    variables: list[dict], samples: dict[str, Sample], target_labels: frozenset[str]
) -> Iterator[str]:
    if [variable["name"] for variable in variables] != VARIABLES:
        yield f"expected the variables {VARIABLES}"
    for variable in (variable for variable in variables if variable["type"] == "query"):
        query = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        tree = parsed(query[1]) if query else "no label_values"
        if isinstance(tree, str) or variable["datasource"] != _DATASOURCE:
            yield f"variable {variable['name']}: {tree}"
            continue
        for selector, _ in selectors(tree):
            asked = {query[2], *(matcher.name for matcher in selector.matchers.matchers)}
            if selector.name not in samples or asked - samples[selector.name].labels.keys() - target_labels:
                yield f"variable {variable['name']}: {query[0]} is not exported"


def _grid_problems(panels: list[dict]) -> Iterator[str]:
    numbers = [panel["id"] for panel in panels]
    if len(set(numbers)) != len(numbers):
        yield "two panels have the same id"
    if [panel["title"] for panel in panels if panel["type"] == "row"] != ROWS:
        yield f"expected the rows {ROWS}"
    places = [(panel["title"], panel["gridPos"]) for panel in panels]
    for title, place in places:
        if min(place["x"], place["y"], place["w"] - 1, place["h"] - 1) < 0 or place["x"] + place["w"] > _COLUMNS:
            yield f"panel {title!r} leaves the grid"
    for (one, here), (other, there) in combinations(places, 2):
        apart = any(
            here[edge] + here[size] <= there[edge] or there[edge] + there[size] <= here[edge]
            for edge, size in (("x", "w"), ("y", "h"))
        )
        if not apart:
            yield f"panels {one!r} and {other!r} overlap"
    for (one, here), (other, there) in pairwise(places):
        if there["y"] < here["y"]:
            yield f"panel {other!r} stands above {one!r}, but behind it in the file: it belongs to another row"


def _panel_problems(panel: dict, samples: dict[str, Sample], target_labels: frozenset[str]) -> Iterator[str]:
    if not panel.get("description"):
        yield "no description"
    if not panel.get("targets") or len({target["refId"] for target in panel["targets"]}) != len(panel["targets"]):
        yield "no query, or two with the same refId"
    for target in panel.get("targets", []):
        if panel["datasource"] != _DATASOURCE or target["datasource"] != _DATASOURCE:
            yield "not the datasource of the variable"
        text = target["expr"].replace("$__rate_interval", "5m")
        unknown = set(re.findall(r"\$\{?(\w+)", text)) - set(VARIABLES)
        if unknown:
            yield f"unknown variables {sorted(unknown)}"
        tree = parsed(text)
        if isinstance(tree, str):
            yield tree
            continue
        found = list(promql_problems(tree, samples, target_labels))
        yield from found
        if not found:
            yield from _target_problems(target, tree, panel["type"], labels_of(tree, samples, target_labels))


def _target_problems(target: dict, tree: object, kind: str, labels: set[str]) -> Iterator[str]:
    gone = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", target["legendFormat"])) - labels
    if gone:
        yield f"the legend names {sorted(gone)}, but the result has {sorted(labels)}"
    for selector, _ in selectors(tree):
        matched = {(matcher.name, matcher.value) for matcher in selector.matchers.matchers}
        ignored = [name for name in VARIABLES[1:] if (name, f"${name}") not in matched]
        if ignored:
            yield f"{selector.name} ignores the variables {ignored}"
    if kind == "heatmap" and (target.get("format") != "heatmap" or labels != {"le"}):
        yield "a heatmap needs the format heatmap and buckets by le"
