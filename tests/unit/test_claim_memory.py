"""Tests of the bounds for the memory of digests (the short forms of claims)."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from examples.claims import NVIDIA, claim, entry
from vcuda.allocations.stored_claims import DIGESTS_BYTES, ClaimReader
from vcuda.bounded import ENTRY_BYTES, SizedCache


def test_digests_of_stored_claims_are_remembered_within_a_bound_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[SizedCache[bytes, Any]] = []

    def cache(*bounds: Any) -> SizedCache[bytes, Any]:
        caches.append(SizedCache(*bounds))
        return caches[0]

    monkeypatch.setattr("vcuda.allocations.stored_claims.SizedCache", cache)
    reader = ClaimReader()
    for number in range(3000):
        text = f'device.attributes["{NVIDIA}"].productName in ["{number}{"x" * 1500}"]'
        reader.read(json.dumps(claim(entry(NVIDIA, text))).encode())
    assert DIGESTS_BYTES - 4096 < caches[0].bytes <= DIGESTS_BYTES


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 400))))
def test_a_cache_never_exceeds_its_bytes_and_evicts_the_least_recently_used(puts: Sequence[tuple[str, int]]) -> None:
    room = 3 * ENTRY_BYTES
    cache: SizedCache[str, int] = SizedCache(room, lambda _, size: size)
    model: dict[str, int] = {}
    for key, size in puts:
        cache.put(key, size)
        model.pop(key, None)
        if size + ENTRY_BYTES <= room:
            model[key] = size
        while sum(model.values()) + len(model) * ENTRY_BYTES > room:
            del model[next(iter(model))]
        assert cache.bytes == sum(model.values()) + len(model) * ENTRY_BYTES
        assert {key: cache.get(key) for key in model} == model
