"""`GET /metrics`: the books of all units and the gauges of those that live, in Prometheus' text. The names are in `core/measures.py`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from dflash2_ray.core.measures import COMMON_LABELS, MEASURES, SGLANG_MEASURES, Measure

CONTENT_TYPE = CONTENT_TYPE_LATEST
CACHE_INFO = "vllm:cache_config_info"
CACHE_LABELS = ("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks")


def exposition(state: Mapping[str, Any], gauges: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Prometheus text. state: of `Books`. gauges: by engine, of units that live: numbers under the keys of the measures, and `cache`,
    the values of CACHE_LABELS."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(state, gauges))  # type: ignore[arg-type]
    return generate_latest(registry)


class _Families:
    def __init__(self, state: Mapping[str, Any], gauges: Mapping[str, Mapping[str, Any]]) -> None:
        self._totals, self._facts, self._gauges = state["totals"], state["facts"], gauges

    def collect(self) -> Iterator[Metric]:
        for measure in MEASURES + (SGLANG_MEASURES if self._facts.get("sglang") else ()):
            if measure.kind == "counter":
                yield self._counter(measure)
            elif measure.kind == "histogram":
                yield self._histogram(measure)
            else:
                yield self._gauge(measure)
        yield self._cache_info()

    def _values(self, engine: str) -> list[str]:
        return [str(self._facts["model"]), engine]

    def _counter(self, measure: Measure) -> Metric:
        family = CounterMetricFamily(measure.name, measure.text, labels=[*COMMON_LABELS, *measure.labels])
        for engine, numbers in sorted(self._totals.items()):
            for values, number in self._samples(measure, numbers):
                family.add_metric([*self._values(engine), *values], number)
        return family

    def _samples(self, measure: Measure, numbers: Mapping[str, float]) -> Iterator[tuple[Sequence[str], float]]:
        """(label values, number): those that have occurred, and those that are told at 0."""
        if not measure.labels:
            yield (), numbers.get(measure.key, 0)
            return
        expected = (
            measure.values if measure.limit is None else [str(index) for index in range(self._facts[measure.limit])]
        )
        prefix = f"{measure.key}/"
        found = {key.removeprefix(prefix): number for key, number in numbers.items() if key.startswith(prefix)}
        for value, number in (dict.fromkeys(expected, 0) | found).items():
            yield value.split("/"), number

    def _histogram(self, measure: Measure) -> Metric:
        family = HistogramMetricFamily(measure.name, measure.text, labels=COMMON_LABELS)
        most = float("inf") if measure.limit is None else self._facts[measure.limit]
        for engine, numbers in sorted(self._totals.items()):
            counts = [int(numbers.get(f"{measure.key}/{index}", 0)) for index in range(len(measure.bounds) + 1)]
            buckets, below = [], 0
            for bound, count in zip(measure.bounds, counts, strict=False):
                below += count
                if bound <= most:
                    buckets.append((floatToGoString(bound), below))
            buckets.append(("+Inf", sum(counts)))
            family.add_metric(self._values(engine), buckets, numbers.get(f"{measure.key}/sum", 0.0))
        return family

    def _gauge(self, measure: Measure) -> Metric:
        family = GaugeMetricFamily(measure.name, measure.text, labels=[*COMMON_LABELS, *measure.labels])
        for engine, numbers in sorted(self._gauges.items()):
            if measure.labels or measure.key in numbers:
                for values, number in self._samples(measure, numbers):
                    family.add_metric([*self._values(engine), *values], number)
        return family

    def _cache_info(self) -> Metric:
        family = GaugeMetricFamily(CACHE_INFO, "The KV pages of a unit", labels=["engine", *CACHE_LABELS])
        for engine, numbers in sorted(self._gauges.items()):
            if "cache" in numbers:
                family.add_metric([engine, *(str(numbers["cache"][label]) for label in CACHE_LABELS)], 1)
        return family
