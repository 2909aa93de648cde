"""Computes from plain manifests on which nodes a pod may run, as Kubernetes documents it.

Tests compare the results with those of the code under test. So this module shares nothing with that code, and prefers
simple code. Sources: https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/ and the API reference of
NodeSelectorTerm and NodeSelectorRequirement.
"""

from collections.abc import Mapping
from typing import Any

Labels = Mapping[str, str]


def may_run_on(pod: Mapping[str, Any], name: str, labels: Labels) -> bool:
    spec = pod["spec"]
    if spec.get("nodeName") and spec["nodeName"] != name:
        return False
    for key, value in (spec.get("nodeSelector") or {}).items():
        if labels.get(key) != value:
            return False
    node_affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(term_allows(term, name, labels) for term in required["nodeSelectorTerms"] or [])


def term_allows(term: Mapping[str, Any], name: str, labels: Labels) -> bool:
    """Return whether a nodeSelectorTerm selects the node. An empty term selects no node."""
    expressions, fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    if not expressions and not fields:
        return False
    return all(line_holds(line, labels) for line in expressions) and all(
        line_holds(line, {"metadata.name": name}) for line in fields
    )


def line_holds(line: Mapping[str, Any], found: Labels) -> bool:
    key, operator, values = line["key"], line["operator"], line.get("values") or []
    if operator == "In":
        return key in found and found[key] in values
    if operator == "NotIn":
        return len(values) > 0 and (key not in found or found[key] not in values)
    if operator == "Exists":
        return len(values) == 0 and key in found
    if operator == "DoesNotExist":
        return len(values) == 0 and key not in found
    if operator in ("Gt", "Lt") and len(values) == 1 and key in found:
        number, bound = go_int64(found[key]), go_int64(values[0])
        if number is not None and bound is not None:
            return number > bound if operator == "Gt" else number < bound
    return False


def go_int64(text: str) -> int | None:
    """Return the result of Go's strconv.ParseInt(text, 10, 64), or None if it fails."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits or any(digit not in "0123456789" for digit in digits):
        return None
    significant = digits.lstrip("0") or "0"
    if len(significant) > 19:
        return None
    number = int(text[: -len(digits)] + significant)
    return number if -(2**63) <= number <= 2**63 - 1 else None
