"""What must hold of Prometheus' rule file: its own strict form, expressions that are right, and a way to the runbook."""

import re
from collections.abc import Iterator

import promql_parser as promql
from exported import Sample
from promql_rules import labels_of, parsed, picks, promql_problems, selectors

SEVERITIES = {"critical", "warning"}
_KEYS = {"alert", "expr", "labels", "annotations"}
_OWN_LABELS = {"alertname", "severity"}


def alert_problems(
    rules: dict, samples: dict[str, Sample], target_labels: frozenset[str], jobs: set[str], anchors: dict[str, set[str]]
) -> Iterator[str]:
    """jobs: names of scrape jobs that the rules must see. anchors: by file, what a runbook may link to."""
    if rules.keys() != {"groups"} or any(group.keys() - {"name", "interval", "rules"} for group in rules["groups"]):
        yield "no rule file: expected groups with name, interval and rules"
        return
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    names = [rule.get("alert") for rule in alerts]
    if len(set(names)) != len(names):
        yield "two alerts have the same name"
    for rule in alerts:
        for problem in _rule_problems(rule, samples, target_labels, jobs, anchors):
            yield f"{rule.get('alert')}: {problem}"


def _rule_problems(
    rule: dict, samples: dict[str, Sample], target_labels: frozenset[str], jobs: set[str], anchors: dict[str, set[str]]
) -> Iterator[str]:
    if rule.keys() - {"for"} != _KEYS:
        yield f"expected the keys {sorted(_KEYS)} and perhaps for, got {sorted(rule)}"
        return
    try:
        promql.parse_duration(rule.get("for", "1s"))
    except ValueError as error:
        yield f"for: {error}"
    if rule["labels"].get("severity") not in SEVERITIES:
        yield f"severity is none of {sorted(SEVERITIES)}"
    if rule["annotations"].keys() != {"summary", "description", "runbook"}:
        yield "expected a summary, a description and a runbook"
        return
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    if anchor not in anchors.get(file, set()):
        yield f"the runbook {rule['annotations']['runbook']} does not exist"
    tree = parsed(rule["expr"])
    if isinstance(tree, str):
        yield tree
        return
    found = list(promql_problems(tree, samples, target_labels))
    yield from found
    if found:
        return
    if not picks(tree):
        yield "has a result when all is well: it would always fire"
    told = labels_of(tree, samples, target_labels) | _OWN_LABELS
    gone = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values()))) - told
    if gone:
        yield f"the text names {sorted(gone)}, but the alert has {sorted(told)}"
    for selector, _ in selectors(tree):
        patterns = [matcher.value for matcher in selector.matchers.matchers if matcher.name == "job"]
        blind = [job for job in sorted(jobs) if not any(re.fullmatch(pattern, job) for pattern in patterns)]
        if blind:
            yield f"{selector.name} does not see the scrape jobs {blind}"
