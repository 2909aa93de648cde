"""Tests of the bounds for the memory of digests (the short forms of claims and of claim templates)."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import structlog
from hypothesis import given, strategies as st

from examples.claims import NVIDIA, claim, entry, template
from tests.api_double import ApiDouble
from vcuda.allocations.stored_claims import DIGESTS_BYTES, ClaimReader
from vcuda.bounded import ENTRY_BYTES, ByteAllowance, SizedCache
from vcuda.kube import TemplateInformer

TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaimtemplates/{}"


def store(api: ApiDouble, names: str, namespace: str = "team-a") -> None:
    """Store a template for each letter of ``names``."""
    for name in names:
        metadata = {"namespace": namespace, "name": name, "uid": f"{namespace}-{name}"}
        api.store(TEMPLATES.format(namespace, name), {**template(), "metadata": metadata})


@pytest.fixture
def known(api: ApiDouble, monkeypatch: pytest.MonkeyPatch) -> TemplateInformer:
    """Return an informer of claim templates that keeps at most two templates per namespace, and three in total."""
    size = ENTRY_BYTES + 100
    monkeypatch.setattr("vcuda.kube.dra.MOST_OF_NAMESPACE_BYTES", 2 * size)
    monkeypatch.setattr("vcuda.kube.dra.MOST_TEMPLATE_BYTES", 3 * size)
    return TemplateInformer(api.kube)


def found(known: TemplateInformer, *names: str) -> list[str]:
    [reflector] = known.reflectors().values()
    reflector.relist()
    return [name for name in names if known.find(*name.split("/"))]


def test_templates_are_kept_within_bounds_per_namespace_and_in_total(api: ApiDouble, known: TemplateInformer) -> None:
    store(api, "abc")
    assert found(known, "team-a/a", "team-a/b", "team-a/c") == ["team-a/a", "team-a/b"]
    for namespace in ("team-b", "team-c"):
        store(api, "a", namespace)
    assert found(known, "team-a/a", "team-b/a", "team-c/a") == ["team-a/a", "team-b/a"]


def test_templates_that_are_not_kept_are_logged_once_for_each_namespace(
    api: ApiDouble, known: TemplateInformer
) -> None:
    store(api, "abcdef")
    with structlog.testing.capture_logs() as logs:
        found(known)
    told = [line for line in logs if line["log_level"] == "warning"]
    assert [(line["namespace"], "their claims are still checked" in line["event"]) for line in told] == [
        ("team-a", True)
    ]


def test_a_deleted_template_makes_room_for_another(api: ApiDouble, known: TemplateInformer) -> None:
    store(api, "abc")
    assert "team-a/c" not in found(known, "team-a/a", "team-a/b", "team-a/c")
    api.remove(TEMPLATES.format("team-a", "a"))
    found(known)
    assert found(known, "team-a/b", "team-a/c") == ["team-a/b", "team-a/c"]
    for name in "bc":
        api.remove(TEMPLATES.format("team-a", name))
    found(known)
    store(api, "de")
    assert found(known, "team-a/d", "team-a/e") == ["team-a/d", "team-a/e"]


def test_a_list_that_breaks_does_not_use_up_room_permanently(api: ApiDouble, known: TemplateInformer) -> None:
    """A template in the broken LIST may be deleted before the next LIST. Its memory must still be released."""
    [reflector] = known.reflectors().values()
    listed = api.list_pages

    def torn(*args: Any, **fields: Any) -> Iterator[Any]:
        yield from listed(*args, **fields)
        raise ConnectionError

    store(api, "a")
    api.list_pages = torn  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        reflector.relist()
    api.list_pages = listed  # type: ignore[method-assign]
    api.remove(TEMPLATES.format("team-a", "a"))
    found(known)
    store(api, "bc")
    assert found(known, "team-a/b", "team-a/c") == ["team-a/b", "team-a/c"]


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


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("uvwx"), st.none() | st.integers(0, 900))))
def test_an_allowance_is_never_exceeded_and_counts_each_object_once(steps: list[tuple[str, str, int | None]]) -> None:
    allowance, kept = ByteAllowance(1500, 2500), dict[tuple[str, str], int]()
    for namespace, uid, size in steps:
        kept.pop((namespace, uid), None)
        if size is None:
            allowance.release(namespace, uid)
        elif allowance.keep(namespace, uid, size):
            kept[namespace, uid] = size + ENTRY_BYTES
        else:
            own = sum(each for (home, _), each in kept.items() if home == namespace)
            assert own + size + ENTRY_BYTES > 1500 or sum(kept.values()) + size + ENTRY_BYTES > 2500
        assert allowance.bytes == sum(kept.values()) <= 2500
    allowance.retain([*kept][:1])
    assert allowance.bytes == sum([*kept.values()][:1])
