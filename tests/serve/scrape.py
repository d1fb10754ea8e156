"""What `/metrics` says, for tests."""

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families


def families(text):
    return {one.name: one for one in text_string_to_metric_families(text)}


def numbers(text):
    """Everything that only grows, summed over engines: {(sample name, its other labels): value}."""
    found = Counter()
    for family in text_string_to_metric_families(text):
        if family.type in ("counter", "histogram"):
            for sample in family.samples:
                labels = tuple(
                    sorted((key, value) for key, value in sample.labels.items() if key not in ("model_name", "engine"))
                )
                found[sample.name, labels] += sample.value
    return found


def growth(before, after):
    """{sample name, or name/label value: growth} of what grew; nothing may have gone back."""
    assert not [key for key, value in before.items() if after[key] < value]
    return {
        "/".join((name, *(value for _, value in labels))): after[name, labels] - before[name, labels]
        for name, labels in after if after[name, labels] != before[name, labels]
    }  # fmt: skip
