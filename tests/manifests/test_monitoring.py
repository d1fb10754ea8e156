"""deploy/monitoring and what k8s/ makes of it: every query reads what `/metrics` really exports, and counts no pod's copy twice."""

import json
import re

import pytest
import yaml
from alert_rules import alert_problems
from cluster_rules import one
from dashboard_rules import dashboard_problems
from exported import TARGET_LABELS, exported
from promql_rules import parsed, selectors
from rendering import OVERLAYS, ROOT, rendered

from dflash2_ray.config import ServiceConfig
from dflash2_ray.core.measures import MEASURES

DASHBOARD = (ROOT / "deploy/monitoring/grafana-dashboard.json").read_text()
ALERTS = (ROOT / "deploy/monitoring/alerts.yaml").read_text()
RULE = (ROOT / "k8s/components/monitoring/prometheus-rule.yaml").read_text()
PLAIN = yaml.safe_load(re.search(r"```yaml\n(rule_files:.*?)```", (ROOT / "README.md").read_text(), re.S)[1])


def scraped() -> dict:
    """The PodMonitor."""
    return one(rendered("single-node"), "PodMonitor")


def target_labels() -> frozenset[str]:
    """What a scraped sample has beside its own labels."""
    (service,) = [endpoint for endpoint in scraped()["spec"]["podMetricsEndpoints"] if endpoint["port"] == "serve"]
    return TARGET_LABELS | {relabeling["targetLabel"] for relabeling in service["relabelings"]}


def jobs() -> set[str]:
    """Under which names Prometheus scrapes the service: the operator's for a PodMonitor, and that of the README."""
    monitor = scraped()["metadata"]
    return {f"{monitor['namespace']}/{monitor['name']}", *(config["job_name"] for config in PLAIN["scrape_configs"])}


def anchors() -> dict[str, set[str]]:
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", (ROOT / "k8s/README.md").read_text(), re.M)
    return {"k8s/README.md": {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}}


def problems(kind: str, text: str) -> list[str]:
    if kind == "dashboard":
        return list(dashboard_problems(json.loads(text), exported(), target_labels()))
    return list(alert_problems(yaml.safe_load(text), exported(), target_labels(), jobs(), anchors()))


TEXTS = {"dashboard": DASHBOARD, "alerts": ALERTS}


@pytest.mark.parametrize("kind", TEXTS)
def test_nothing_is_wrong(kind):
    assert problems(kind, TEXTS[kind]) == []


def expressions() -> list[str]:
    panels = [
        target["expr"].replace("$__rate_interval", "5m")
        for panel in json.loads(DASHBOARD)["panels"]
        for target in panel.get("targets", [])
    ]
    return [*panels, *(rule["expr"] for group in yaml.safe_load(ALERTS)["groups"] for rule in group["rules"])]


def test_all_that_is_ours_is_shown():
    """What no other dashboard for vLLM's names could show."""
    read = {selector.name for text in expressions() for selector, _ in selectors(parsed(text))}
    ours = {measure.name for measure in MEASURES if measure.name.startswith("dflash2:")}
    assert {name for name in ours if not any(sample.startswith(name) for sample in read)} == set()


def test_every_family_is_exported():
    told = exported()
    suffixes = {"counter": "_total", "gauge": "", "histogram": "_bucket"}
    assert [measure.name for measure in MEASURES if measure.name + suffixes[measure.kind] not in told] == []


def test_the_floor_is_that_of_the_startup_probe():
    (rule,) = [
        rule for rule in yaml.safe_load(ALERTS)["groups"][0]["rules"] if rule["alert"] == "DFlash2AcceptanceCollapsed"
    ]
    assert float(rule["expr"].rpartition("<")[2]) == ServiceConfig.model_fields["acceptance_floor"].default


def test_every_alert_has_its_heading():
    names = [rule["alert"] for group in yaml.safe_load(ALERTS)["groups"] for rule in group["rules"]]
    _, _, section = (ROOT / "k8s/README.md").read_text().partition("\n## Alerts\n")
    assert re.findall(r"^### (\w+)$", section.partition("\n## ")[0], re.M) == names


def test_kubernetes_has_the_words_of_the_rule_file():
    _, _, spec = RULE.partition("\nspec:\n")
    assert spec == "".join(f"  {line}\n" for line in ALERTS.splitlines()), (
        "write alerts.yaml into prometheus-rule.yaml: its first line says how"
    )


@pytest.mark.parametrize("overlay", [overlay for overlay in OVERLAYS if overlay != "cpu-dev"])
def test_kubernetes_has_the_same_rules_and_dashboard(overlay):
    documents = rendered(overlay)
    assert one(documents, "PodMonitor") == scraped()
    assert one(documents, "PrometheusRule")["spec"] == yaml.safe_load(ALERTS)
    shown = one(documents, "ConfigMap")
    assert shown["data"] == {"dflash2.json": DASHBOARD}
    assert "grafana_dashboard" in shown["metadata"]["labels"]


def test_plain_prometheus_scrapes_as_the_podmonitor_does():
    (config,) = PLAIN["scrape_configs"]
    (endpoint,) = [endpoint for endpoint in scraped()["spec"]["podMetricsEndpoints"] if endpoint["port"] == "serve"]
    assert config["metrics_path"] == endpoint["path"] == "/metrics"
    assert config["authorization"]["type"] == endpoint["authorization"]["type"] == "Bearer"
    assert [(ROOT / file).read_text() for file in PLAIN["rule_files"]] == [ALERTS]


FIRST_COPY = "max without (instance, pod, container) "
MUTANTS = [
    # queries, wherever they stand
    ("dashboard", "dflash2:draft_wait_seconds_bucket", "dflash2:draft_waiting_seconds_bucket", "not exported: ['dflash2:draft_waiting_seconds_bucket']"),
    ("alerts", "vllm:kv_cache_usage_perc{", "vllm:gpu_cache_usage_perc{", "not exported: ['vllm:gpu_cache_usage_perc']"),
    ("dashboard", "vllm:generation_tokens_total{", "vllm:generation_tokens{", "not exported: ['vllm:generation_tokens']"),
    ("dashboard", 'finished_reason=\\"error\\"', 'reason=\\"error\\"', "has no label 'reason'"),
    ("dashboard", 'finished_reason=\\"abort\\"', 'finished_reason=\\"aborted\\"', "has no finished_reason='aborted'"),
    ("alerts", 'role="target"', 'role="rank"', "has no role='rank'"),
    ("alerts", "model_name, reason)", "model_name, cause)", "sum by ['cause'], which"),
    ("alerts", "rate(vllm:spec_decode_num_drafts_total", "deriv(vllm:spec_decode_num_drafts_total", "is read without rate or increase"),
    ("dashboard", "(vllm:num_requests_waiting{job", "(rate(vllm:num_requests_waiting{job", "unclosed left parenthesis"),
    ("alerts", '(dflash2:spec_active{job=~"(.+/)?dflash2"})', '(rate(dflash2:spec_active{job=~"(.+/)?dflash2"}[5m]))', "is a gauge, and is read by ['rate']"),
    ("alerts", '[10m]))))\n', '])))\n', "unexpected"),
    ("dashboard", "histogram_quantile(0.99, sum by (le) (" + FIRST_COPY + "(rate(dflash2:verify_seconds_bucket", "histogram_quantile(0.99, sum by (engine) (" + FIRST_COPY + "(rate(dflash2:verify_seconds_bucket", "not over `sum by (le)`"),
    ("dashboard", "histogram_quantile(0.5, sum by (le) (", "histogram_quantile(0.5, avg by (le) (", "not over `sum by (le)`"),
    ("dashboard", "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum", "which is no bucket"),
    ("dashboard", "ignoring (position) group_left ()", "", "['position'] on the left and [] on the right never match"),
    # the copies of several pods
    ("dashboard", f"sum({FIRST_COPY}(vllm:num_requests_running", "sum((vllm:num_requests_running", "copies of several pods"),
    ("dashboard", f"{FIRST_COPY}(rate(vllm:prompt_tokens_total", "sum without (instance, pod, container) (rate(vllm:prompt_tokens_total", "copies of several pods"),
    ("alerts", f"{FIRST_COPY}(rate(vllm:admission_rejections_total", "max without (instance, pod) (rate(vllm:admission_rejections_total", "copies of several pods"),
    ("alerts", f"{FIRST_COPY}(increase(dflash2:restarts_total", "max by (instance, pod, container) (increase(dflash2:restarts_total", "copies of several pods"),
    # the dashboard
    ("dashboard", '"uid": "dflash2-service",', "", "the dashboard has no ['uid']"),
    ("dashboard", '"schemaVersion": 38', '"schemaVersion": 30', "older than Grafana 10"),
    ("dashboard", '"id": 3,', '"id": 2,', "the same id"),
    ("dashboard", '{"h": 8, "w": 10, "x": 4, "y": 1}', '{"h": 8, "w": 11, "x": 4, "y": 1}', "'Requests' and 'Tokens per second' overlap"),
    ("dashboard", '{"h": 8, "w": 8, "x": 16, "y": 9}', '{"h": 8, "w": 9, "x": 16, "y": 9}', "leaves the grid"),
    ("dashboard", '{"h": 8, "w": 8, "x": 0, "y": 9}', '{"h": 8, "w": 8, "x": 0, "y": 109}', "it belongs to another row"),
    ("dashboard", '"title": "Pipeline"', '"title": "Pipelines"', "expected the rows"),
    ("dashboard", '"name": "engine"', '"name": "unit"', "expected the variables"),
    ("dashboard", "label_values(dflash2:restarts_total, job)", "label_values(dflash2:restart_total, job)", "variable job: label_values(dflash2:restart_total, job) is not exported"),
    ("dashboard", "$__rate_interval", "$__rate", "unknown variables ['__rate']"),
    ("dashboard", '"legendFormat": "{{finished_reason}}"', '"legendFormat": "{{reason}}"', "the legend names ['reason']"),
    ("dashboard", ', engine=~\\"$engine\\"}', "}", "ignores the variables ['engine']"),
    ("dashboard", '"format": "heatmap"', '"format": "time_series"', "a heatmap needs"),
    ("dashboard", '"refId": "B"', '"refId": "A"', "two with the same refId"),
    ("dashboard", '"uid": "${datasource}"', '"uid": "prometheus"', "not the datasource"),
    ("dashboard", '"description": "From arrival to end.",', "", "no description"),
    # the alerts
    ("alerts", "groups:", "spec:", "no rule file"),
    ("alerts", "    for: 2m", "    fur: 2m", "expected the keys"),
    ("alerts", "    for: 2m", "    for: two minutes", "for: "),
    ("alerts", "severity: critical", "severity: page", "severity is none of"),
    ("alerts", "- alert: DFlash2NoUnit", "- alert: DFlash2RankDown", "the same name"),
    ("alerts", "#dflash2nounit", "#no-unit", "the runbook k8s/README.md#no-unit does not exist"),
    ("alerts", "      summary: Requests to {{ $labels.model_name }} fail", "      message: x", "expected a summary"),
    ("alerts", "Unit {{ $labels.engine }} of", "Unit {{ $labels.unit }} of", "the text names ['unit']"),
    ("alerts", "      > 0.95\n", "", "it would always fire"),
    ("alerts", 'job=~"(.+/)?dflash2"', 'job=~"dflash2"', "does not see the scrape jobs ['dflash2/dflash2']"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "old", "new", "says"),
    MUTANTS,
    ids=[f"{row[0]}-{index}-{row[3][:32]}" for index, row in enumerate(MUTANTS)],
)
def test_mistakes_are_found(kind, old, new, says):
    assert old in TEXTS[kind]
    found = problems(kind, TEXTS[kind].replace(old, new))
    assert any(says in problem for problem in found), found
