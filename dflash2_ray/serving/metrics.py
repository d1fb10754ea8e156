"""`GET /metrics`: what a unit counts, under vLLM's names, so that its tools and dashboards read it."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST
_COUNTERS = {
    "vllm:spec_decode_num_drafts": ("num_drafts", "Verify steps per request with at least one draft"),
    "vllm:spec_decode_num_draft_tokens": ("num_draft_tokens", "Draft tokens that were verified"),
    "vllm:spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Draft tokens that were accepted, before a stop or limit cuts"),
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


def exposition(facts: Mapping[str, Any]) -> bytes:
    """Prometheus text of what a unit says of itself (`Client.describe`)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Facts(facts))  # type: ignore[arg-type]
    return generate_latest(registry)


class _Facts:
    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "engine"]
        values = [str(self._facts["model"]), "0"]
        counted = self._facts["spec_counters"]
        for name, (key, text) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            counter.add_metric(values, counted[key])
            yield counter
        per_position = CounterMetricFamily(_PER_POSITION, "Steps that accepted the draft at this position", labels=[*labels, "position"])
        for position, count in enumerate(counted["accepted_per_position"]):
            per_position.add_metric([*values, str(position)], count)
        yield per_position
        used = 1 - self._facts["num_free_pages"] / self._facts["num_pages"]
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in steps", self._facts["num_requests_running"]),
            ("vllm:num_requests_waiting", "Requests that wait", self._facts["num_requests_waiting"]),
            ("vllm:kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1", used),
        ):
            gauge = GaugeMetricFamily(name, text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
