"""The same numbers through `ray.util.metrics`, for clusters that scrape Ray's own port. Legal names: `dflash2_*`; one more label,
`application`, because that port speaks for the whole cluster."""

from collections.abc import Mapping, Sequence
from typing import Any

from ray.util import metrics

from dflash2_ray.core.ledger import Numbers
from dflash2_ray.core.measures import COMMON_LABELS, MEASURES, Measure


class RayMirror:
    """One per process, of Serve's `application`. It is told of growth only."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._metrics: dict[str, Any] = {}
        for one in MEASURES:
            tags = (*COMMON_LABELS, "application", *one.labels)
            if one.kind == "histogram":
                self._metrics[one.key] = metrics.Histogram(
                    one.ray_name, one.text, boundaries=list(one.bounds), tag_keys=tags
                )
            else:
                kind = metrics.Counter if one.kind == "counter" else metrics.Gauge
                self._metrics[one.key] = kind(one.ray_name, one.text, tag_keys=tags)

    def tell(self, engine: str, growth: Numbers, gauges: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """What came since the last call, and the gauges as they are."""
        tags = {"model_name": str(facts["model"]), "engine": engine, "application": self._application}
        for one in MEASURES:
            if one.kind == "histogram":
                counts = [int(growth.get(f"{one.key}/{index}", 0)) for index in range(len(one.bounds) + 1)]
                for value, count in zip(
                    values_in(one.bounds, counts, growth.get(f"{one.key}/sum", 0.0)), counts, strict=True
                ):
                    for _ in range(count):
                        self._metrics[one.key].observe(value, tags)
                continue
            for labels, number in _of(one, growth if one.kind == "counter" else gauges):
                metric, own = self._metrics[one.key], tags | dict(zip(one.labels, labels, strict=True))
                if one.kind == "gauge":
                    metric.set(number, own)
                elif number > 0:
                    metric.inc(number, own)


def _of(measure: Measure, numbers: Mapping[str, Any]) -> list[tuple[list[str], float]]:
    """(label values, number) of one measure."""
    if not measure.labels:
        return [([], numbers[measure.key])] if measure.key in numbers else []
    prefix = f"{measure.key}/"
    return [(key.removeprefix(prefix).split("/"), number) for key, number in numbers.items() if key.startswith(prefix)]


def values_in(bounds: Sequence[float], counts: Sequence[int], total: float) -> list[float]:
    """One value per bucket (the last one is beyond all bounds) that lies in it, such that `counts` observations of them sum up to
    `total`, as far as there is one: Ray takes observations, not buckets."""
    lows = [0.0, *bounds]
    highs = [*bounds, max(total, 2 * bounds[-1])]
    least = sum(low * count for low, count in zip(lows, counts, strict=True))
    most = sum(high * count for high, count in zip(highs, counts, strict=True))
    share = min(max((total - least) / (most - least), 1e-6), 1.0) if most > least else 1.0
    return [low + share * (high - low) for low, high in zip(lows, highs, strict=True)]
