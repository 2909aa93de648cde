"""Tests that a reflector's store returns exactly the objects of a namespace."""

from typing import Any

from hypothesis import given, strategies as st

from vcuda.kube import Key
from vcuda.kube.store import Listing, Store, StoreEntry

keys = st.builds(Key, st.sampled_from(["a", "b", ""]), st.sampled_from(["1", "2"]))
entries = st.builds(StoreEntry, st.just("uid"), st.just("1"), st.integers())
changes = st.one_of(
    st.tuples(st.just("put"), keys, st.none() | entries), st.tuples(st.just("swap"), st.dictionaries(keys, entries))
)


@given(st.lists(changes))
def test_the_objects_of_a_namespace_are_its_part_of_all_objects(made: list[tuple[Any, ...]]) -> None:
    store = Store[int]()
    for what, *change in made:
        if what == "swap":
            store.swap(Listing(change[0], "2", {}))
        else:
            store.put(change[0], change[1], "2")
        grouped: dict[str, list[int]] = {}
        for key, value in store.snapshot().items():
            grouped.setdefault(key.namespace, []).append(value)
        assert {name: store.within(name) for name in store.namespaces()} == grouped
        assert store.within("of nobody") == []
