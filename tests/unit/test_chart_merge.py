"""Tests that the variants of an object are merged into one template of the chart, which renders each unchanged."""

from typing import Any

from hypothesis import given, strategies as st

from tests.tables import cases
from tools.chart.merge import ABSENT, Branch, Choice, Condition, Items, Leaf, Tree, condition_of, merge

NAMES = ("hami", "prometheus")
SCALARS = st.sampled_from(["a", "b", 1, True, None])


def trees(depth: int) -> st.SearchStrategy[Any]:
    if not depth:
        return SCALARS
    inner = trees(depth - 1)
    named = st.builds(lambda name, value: {"name": name, "value": value}, st.sampled_from("xyz"), inner)
    return st.one_of(
        SCALARS,
        st.dictionaries(st.sampled_from("pqr"), inner, min_size=1, max_size=3),
        st.lists(named, min_size=1, max_size=3, unique_by=lambda each: each["name"]),
        st.lists(SCALARS, min_size=1, max_size=4),
    )


def holds(condition: Condition, component: str) -> bool:
    return condition.in_base != (component in condition.components)


def resolved(tree: Tree | None, component: str) -> Any:
    """Return what the chart's template renders with this component. With ``""``, return the base without components."""
    match tree:
        case Leaf(value):
            return value
        case Branch(parts):
            return {key: resolved(part, component) for key, part, condition in parts if holds(condition, component)}
        case Items(parts):
            return [resolved(part, component) for part, condition in parts if holds(condition, component)]
        case Choice(by_component, base):
            return resolved(dict(by_component).get(component, base), component)
    raise AssertionError(tree)


def filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: filled(each) for key, each in value.items()}
    return [filled(each) for each in value] if isinstance(value, list) else value


@given(trees(3), trees(3), trees(3))
def test_the_tree_renders_each_variant_unchanged(base: Any, one: Any, other: Any) -> None:
    variants = dict(zip(NAMES, (one, other), strict=True))
    tree = merge(base, variants)
    assert filled(resolved(tree, "")) == base
    for name, value in variants.items():
        assert filled(resolved(tree, name)) == value


@cases(
    "base, variants, condition",
    everywhere=({"a": 1}, {"hami": {"a": 2}}, Condition()),
    removed=({"a": 1}, {"hami": ABSENT, "prometheus": {"a": 1}}, Condition(True, ("hami",))),
    added=(ABSENT, {"hami": {"a": 1}, "prometheus": ABSENT}, Condition(False, ("hami",))),
)
def test_each_part_names_its_components(base: Any, variants: dict[str, Any], condition: Condition) -> None:
    assert condition_of(base, variants) == condition
