"""What a PromQL expression reads and gives, for tests: its selectors, and the labels of its result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser as promql

TARGET_LABELS = frozenset({"job", "instance"})
"""What Prometheus itself adds to every series of a target."""
RATES = frozenset({"rate", "increase", "irate"})

Labels = frozenset[str]


class QueryError(AssertionError):
    """The expression could never give what it is meant to."""


def selectors(expr: Any) -> Iterator[Any]:
    """Yield every vector selector of a parsed expression."""
    match expr:
        case promql.VectorSelector():
            yield expr
        case promql.MatrixSelector():
            yield expr.vector_selector
        case promql.Call():
            for argument in expr.args:
                yield from selectors(argument)
        case promql.AggregateExpr() | promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            yield from selectors(expr.expr)
        case promql.BinaryExpr():
            yield from selectors(expr.lhs)
            yield from selectors(expr.rhs)
        case promql.NumberLiteral() | promql.StringLiteral():
            return
        case _:
            raise QueryError(f"{type(expr).__name__} is not known here")


def result_labels(expr: Any, known: Mapping[str, Labels]) -> Labels | None:
    """Return the labels that the result has, None for a scalar.

    known holds the labels of each sample name. Raises QueryError for a metric or label that does not exist, a rate of
    what is no counter, a quantile without `le`, and two sides whose series could never match.
    """
    match expr:
        case promql.VectorSelector():
            return _selected(expr, known)
        case promql.MatrixSelector():
            return _selected(expr.vector_selector, known)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return result_labels(expr.expr, known)
        case promql.AggregateExpr():
            return _aggregated(expr, known)
        case promql.Call():
            return _called(expr, known)
        case promql.BinaryExpr():
            return _combined(expr, known)
        case _:
            return None


def _selected(selector: Any, known: Mapping[str, Labels]) -> Labels:
    if selector.name not in known:
        raise QueryError(f"no metric is called {selector.name}")
    labels = known[selector.name] | TARGET_LABELS
    for matcher in selector.matchers.matchers:
        if matcher.name not in labels:
            raise QueryError(f"{selector.name} has no label {matcher.name}")
    return labels


def _aggregated(expr: Any, known: Mapping[str, Labels]) -> Labels:
    inner = result_labels(expr.expr, known)
    if inner is None:
        raise QueryError("an aggregation of a number")
    if expr.modifier is None:
        return frozenset()
    named = frozenset(expr.modifier.labels)
    if not named <= inner:
        raise QueryError(f"nothing below has the labels {sorted(named - inner)}")
    return named if expr.modifier.type == promql.AggModifierType.By else inner - named


def _called(expr: Any, known: Mapping[str, Labels]) -> Labels | None:
    found = [labels for labels in (result_labels(argument, known) for argument in expr.args) if labels is not None]
    name = expr.func.name
    if name in RATES:
        (selector,) = selectors(expr)
        if not selector.name.endswith(("_total", "_bucket", "_sum", "_count")):
            raise QueryError(f"{name} of {selector.name}, which is no counter")
    if name == "histogram_quantile":
        if "le" not in found[-1]:
            raise QueryError("a quantile needs the label le")
        return found[-1] - {"le"}
    return found[-1] if found else None


def _combined(expr: Any, known: Mapping[str, Labels]) -> Labels | None:
    sides = [result_labels(side, known) for side in (expr.lhs, expr.rhs)]
    if None in sides or (expr.modifier is not None and expr.modifier.matching is not None):
        return sides[0] if sides[0] is not None else sides[1]
    if sides[0] != sides[1]:
        raise QueryError(f"a side with {sorted(sides[0] or ())} never matches one with {sorted(sides[1] or ())}")
    return sides[0]
