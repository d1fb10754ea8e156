"""What must hold of one PromQL expression: that it reads what is exported, adds up no copies, and can have a result.

Every rule yields sentences. It knows neither Grafana nor Prometheus' rule files.
"""

from collections.abc import Iterator

import promql_parser as promql
from exported import COPIES, Sample

_OF_COUNTERS = {"rate", "increase"}
_PICKING = {"<", ">", "<=", ">=", "==", "!=", "and", "unless"}


def parsed(text: str) -> promql.Expr | str:
    """The expression, or why it is none."""
    try:
        return promql.parse(text)
    except ValueError as error:
        return str(error)


def promql_problems(tree: promql.Expr, samples: dict[str, Sample], target_labels: frozenset[str]) -> Iterator[str]:
    """samples: by name. target_labels: what Prometheus adds to each of them."""
    unknown = {selector.name for selector, _ in selectors(tree)} - samples.keys()
    if unknown:
        yield f"not exported: {sorted(map(str, unknown))}"
        return
    for selector, parents in selectors(tree):
        yield from _matcher_problems(selector, samples[selector.name], target_labels)
        yield from _reading_problems(selector, parents, samples[selector.name])
    for part in _parts(tree):
        if isinstance(part, promql.AggregateExpr) and part.modifier:
            gone = set(part.modifier.labels) - labels_of(part.expr, samples, target_labels)
            if gone and part.modifier.type == promql.AggModifierType.By:
                yield f"{part.op} by {sorted(gone)}, which {part.expr.prettify()} does not have"
        elif isinstance(part, promql.BinaryExpr):
            yield from _matching_problems(part, samples, target_labels)
        elif isinstance(part, promql.Call) and part.func.name == "histogram_quantile":
            yield from _quantile_problems(part.args[1])


def selectors(
    tree: promql.Expr, parents: tuple[promql.Expr, ...] = ()
) -> Iterator[tuple[promql.VectorSelector, tuple[promql.Expr, ...]]]:
    """(selector, what stands around it, innermost first)."""
    if isinstance(tree, promql.VectorSelector):
        yield tree, parents
    for child in _children(tree):
        yield from selectors(child, (tree, *parents))


def labels_of(tree: promql.Expr, samples: dict[str, Sample], target_labels: frozenset[str]) -> set[str]:
    """Of the result. None for a number."""
    if isinstance(tree, promql.VectorSelector):
        return set(samples[tree.name].labels) | target_labels
    if isinstance(tree, promql.AggregateExpr):
        named = set(tree.modifier.labels) if tree.modifier else set()
        if not tree.modifier or tree.modifier.type == promql.AggModifierType.By:
            return named
        return labels_of(tree.expr, samples, target_labels) - named
    inner = [labels_of(child, samples, target_labels) for child in _children(tree)]
    if isinstance(tree, promql.BinaryExpr):
        left, right = inner
        if isinstance(tree.lhs, promql.NumberLiteral) or (
            tree.modifier and tree.modifier.card == promql.VectorMatchCardinality.OneToMany
        ):
            return right
        one_to_one = (
            tree.modifier and tree.modifier.matching and tree.modifier.card == promql.VectorMatchCardinality.OneToOne
        )
        return _matched(tree, left) if one_to_one else left
    found = set().union(*inner)
    if isinstance(tree, promql.Call) and tree.func.name == "absent":
        return set()
    return found - {"le"} if isinstance(tree, promql.Call) and tree.func.name == "histogram_quantile" else found


def _children(tree: promql.Expr) -> list[promql.Expr]:
    if isinstance(tree, promql.BinaryExpr):
        return [tree.lhs, tree.rhs]
    if isinstance(tree, promql.Call):
        return list(tree.args)
    if isinstance(tree, promql.MatrixSelector):
        return [tree.vector_selector]
    return (
        [tree.expr]
        if isinstance(tree, promql.AggregateExpr | promql.ParenExpr | promql.UnaryExpr | promql.SubqueryExpr)
        else []
    )


def _parts(tree: promql.Expr) -> Iterator[promql.Expr]:
    yield tree
    for child in _children(tree):
        yield from _parts(child)


def _matcher_problems(selector: promql.VectorSelector, sample: Sample, target_labels: frozenset[str]) -> Iterator[str]:
    for matcher in selector.matchers.matchers:
        if matcher.name not in sample.labels.keys() | target_labels:
            yield f"{selector.name} has no label {matcher.name!r}, but {sorted(sample.labels)}"
        elif (
            matcher.op == promql.MatchOp.Equal
            and matcher.name in sample.labels
            and matcher.value not in sample.labels[matcher.name]
        ):
            yield f"{selector.name} has no {matcher.name}={matcher.value!r}, but {sorted(sample.labels[matcher.name])}"


def _reading_problems(
    selector: promql.VectorSelector, parents: tuple[promql.Expr, ...], sample: Sample
) -> Iterator[str]:
    """Counters are read as rates, gauges as they are; and all ingresses tell the same sums, so the first step leaves one of the copies."""
    inside = [type(parent) is promql.AggregateExpr for parent in parents]
    first = inside.index(True) if True in inside else len(parents)
    functions = {parent.func.name for parent in parents[:first] if isinstance(parent, promql.Call)}
    if sample.only_grows and not functions & _OF_COUNTERS:
        yield f"{selector.name} only grows, and is read without rate or increase"
    if not sample.only_grows and functions & _OF_COUNTERS:
        yield f"{selector.name} is a gauge, and is read by {sorted(functions)}"
    copies = parents[first] if first < len(parents) else None
    one = (
        copies is not None
        and str(copies.op) == "max"
        and copies.modifier
        and copies.modifier.type == promql.AggModifierType.Without
    )
    if not one or frozenset(copies.modifier.labels) != COPIES:
        yield f"{selector.name}: the copies of several pods are not made one by `max without ({', '.join(sorted(COPIES))})` first"


def _matching_problems(
    operation: promql.BinaryExpr, samples: dict[str, Sample], target_labels: frozenset[str]
) -> Iterator[str]:
    if isinstance(operation.lhs, promql.NumberLiteral) or isinstance(operation.rhs, promql.NumberLiteral):
        return
    left, right = (
        _matched(operation, labels_of(side, samples, target_labels)) for side in (operation.lhs, operation.rhs)
    )
    if left != right and str(operation.op) != "or":
        yield f"{operation.op}: {sorted(left)} on the left and {sorted(right)} on the right never match"


def _matched(operation: promql.BinaryExpr, labels: set[str]) -> set[str]:
    matching = operation.modifier and operation.modifier.matching
    if not matching:
        return labels
    return (
        labels & set(matching.labels)
        if matching.type == promql.LabelModifierType.Include
        else labels - set(matching.labels)
    )


def _quantile_problems(buckets: promql.Expr) -> Iterator[str]:
    summed = isinstance(buckets, promql.AggregateExpr) and str(buckets.op) == "sum" and buckets.modifier
    if not summed or buckets.modifier.type != promql.AggModifierType.By or "le" not in buckets.modifier.labels:
        yield f"histogram_quantile is not over `sum by (le)`: {buckets.prettify()}"
    for selector, _ in selectors(buckets):
        if not selector.name.endswith("_bucket"):
            yield f"histogram_quantile over {selector.name}, which is no bucket"


def picks(tree: promql.Expr) -> bool:
    """Whether the expression has a result only when something is wrong, as an alert's must."""
    if isinstance(tree, promql.Call):
        return tree.func.name == "absent"
    return isinstance(tree, promql.BinaryExpr) and str(tree.op) in _PICKING
