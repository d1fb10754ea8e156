"""What `/metrics` says, as rules for PromQL need it, and what Prometheus adds. It knows no expression."""

from dataclasses import dataclass, field
from functools import cache

from prometheus_client.parser import text_string_to_metric_families

from dflash2_ray.core.books import Books
from dflash2_ray.core.ledger import Ledger
from dflash2_ray.core.measures import MEASURES, Measure
from dflash2_ray.serving.metrics import CACHE_LABELS, exposition

COPIES = frozenset(
    {"instance", "pod", "container"}
)  # of a target: which pod told it, one of several that tell the same
TARGET_LABELS = COPIES | {"job", "namespace", "endpoint"}  # the operator's, for a PodMonitor
_FACTS = {"model": "m", "num_speculative_tokens": 7, "most_tokens_per_step": 8, "max_model_len": 200, "sglang": False}
_RANKS = ("target/0", "target/1", "drafter/0")


@dataclass
class Sample:
    """kind: of its family. labels: the values that were told, by label."""

    kind: str
    labels: dict[str, set[str]] = field(default_factory=dict)

    @property
    def only_grows(self) -> bool:
        return self.kind != "gauge"


@cache
def exported() -> dict[str, Sample]:
    """By sample name, of a unit in which everything has happened once."""
    ledger, gauges = Ledger(), {"cache": dict.fromkeys(CACHE_LABELS, 1)}
    for measure in MEASURES:
        if measure.kind == "histogram":
            ledger.observe(measure.key, measure.bounds[0])
        for key in _keys(measure):
            if measure.kind == "counter":
                ledger.add(key)
            elif measure.kind == "gauge":
                gauges[key] = 1
    books = Books()
    books.take("unit", "0", 1, ledger.numbers, _FACTS)
    found: dict[str, Sample] = {}
    for family in text_string_to_metric_families(exposition(books.state(), {"0": gauges}).decode()):
        for told in family.samples:
            sample = found.setdefault(told.name, Sample(family.type))
            for label, value in told.labels.items():
                sample.labels.setdefault(label, set()).add(value)
    return found


def _keys(measure: Measure) -> list[str]:
    if not measure.labels:
        return [measure.key]
    values = _RANKS if measure.key == "rank_up" else (measure.values or ("0",))
    return [f"{measure.key}/{value}" for value in values]
