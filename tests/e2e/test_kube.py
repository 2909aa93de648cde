"""Tests of our client (`vcuda.kube`) with a real API server.

The ledger relies on the properties of writes, patches and lists that are tested here. One test checks how the client
uses the credentials in a pod.
"""

from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from controller.recount.publisher import is_without_home
from tests.e2e.cluster import Cluster, Json
from vcuda.errors import ApiError, Conflict, Gone, NotFound
from vcuda.kube import JSON_PATCH, MERGE_PATCH, Kube, Page


def read(body: bytes) -> Json:
    found: Json = msgspec.json.decode(body)
    return found


def manifest(value: str, **metadata: str) -> bytes:
    return msgspec.json.encode({"metadata": {"name": "ledger", **metadata}, "data": {"value": value}})


def test_a_put_with_an_old_version_raises_conflict_and_changes_nothing(kube: Kube, path: str) -> None:
    """All writes of ledgers rely on this compare-and-swap."""
    first = read(kube.post(path, manifest("first")))
    read(kube.put(f"{path}/ledger", manifest("second", resourceVersion=first["metadata"]["resourceVersion"])))
    with pytest.raises(Conflict, match="please apply your changes to the latest version"):
        kube.put(f"{path}/ledger", manifest("third", resourceVersion=first["metadata"]["resourceVersion"]))
    assert read(kube.get(f"{path}/ledger"))["data"] == {"value": "second"}


def test_a_create_with_a_name_in_use_raises_conflict(kube: Kube, path: str) -> None:
    kube.post(path, manifest("first"))
    with pytest.raises(Conflict, match='configmaps "ledger" already exists'):
        kube.post(path, manifest("second"))


def test_a_read_of_a_missing_object_raises_not_found(kube: Kube, path: str) -> None:
    with pytest.raises(NotFound, match='configmaps "ledger" not found'):
        kube.get(f"{path}/ledger")


def test_patches_are_applied_by_their_content_type(kube: Kube, path: str) -> None:
    """The content type of a strategic merge patch must not be used for a JSON Patch."""
    kube.post(path, manifest("first"))
    kube.patch(f"{path}/ledger", b'[{"op": "add", "path": "/data/a.b", "value": "x"}]', JSON_PATCH)
    kube.patch(f"{path}/ledger", '{"data": {"value": null, "c": "é"}}'.encode(), MERGE_PATCH)
    assert read(kube.get(f"{path}/ledger"))["data"] == {"a.b": "x", "c": "é"}


def test_a_json_patch_whose_test_fails_is_rejected(kube: Kube, path: str) -> None:
    kube.post(path, manifest("first"))
    with pytest.raises(ApiError) as caught:
        kube.patch(f"{path}/ledger", b'[{"op": "test", "path": "/data/value", "value": "x"}]', JSON_PATCH)
    assert caught.value.status == 422


def test_a_delete_with_another_uid_raises_conflict(kube: Kube, path: str) -> None:
    stored = read(kube.post(path, manifest("first")))
    with pytest.raises(Conflict):
        kube.delete(f"{path}/ledger", b'{"preconditions": {"uid": "another"}}')
    kube.delete(f"{path}/ledger", msgspec.json.encode({"preconditions": {"uid": stored["metadata"]["uid"]}}))
    with pytest.raises(NotFound):
        kube.delete(f"{path}/ledger")


def test_a_dry_run_stores_nothing(kube: Kube, path: str) -> None:
    kube.post(path, manifest("first"), {"dryRun": "All"})
    with pytest.raises(NotFound):
        kube.get(f"{path}/ledger")


def test_an_invalid_continue_token_is_not_mistaken_for_an_expired_one(kube: Kube, path: str) -> None:
    with pytest.raises(ApiError) as caught:
        list(kube.list_pages(path, {"continue": "nonsense"}))
    assert not isinstance(caught.value, Gone)


def test_in_a_pod_the_mounted_token_is_used_and_read_again_after_a_401(
    cluster: Cluster, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet replaces the token file before the token expires, so the client must read the file again."""
    address = urlsplit(cluster.server)
    token = tmp_path / "token"
    token.write_text("outlived")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(address.hostname))
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(address.port))
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_CERT_FILENAME", str(cluster.ca_file))
    with closing(Kube.connect()) as kube:
        with pytest.raises(ApiError) as caught:
            kube.get(path)
        assert caught.value.status == 401
        token.write_text(cluster.token + "\n")
        kube.post(path, manifest("first"))


def test_a_terminating_namespace_accepts_no_object_and_the_rejection_says_why(
    cluster: Cluster, kube: Kube, namespace: str, path: str
) -> None:
    """A ConfigMap with a finalizer keeps the namespace terminating during this test."""
    held = {"metadata": {"name": "held", "finalizers": ["e2e.vcuda.io/held"]}}
    kube.post(path, msgspec.json.encode(held))
    cluster.delete_namespace(namespace)
    with pytest.raises(ApiError) as rejected:
        kube.post(path, manifest("late"))
    assert is_without_home(rejected.value)
    assert not isinstance(rejected.value, NotFound)
    kube.patch(f"{path}/held", b'{"metadata": {"finalizers": null}}', MERGE_PATCH)


def test_warnings_are_returned_with_the_answer(kube: Kube, path: str) -> None:
    manifest = {"metadata": {"name": "warned"}, "date": {}}
    warnings = kube.post_heard(path, msgspec.json.encode(manifest), {"dryRun": "All"}).warnings
    assert warnings == ('unknown field "date"',)


def names(page: Page) -> list[str]:
    return [read(raw)["metadata"]["name"] for raw in page.items]


def test_a_list_contains_every_object_whose_creation_was_confirmed_before_it(kube: Kube, path: str) -> None:
    """The ledger counts pods by such lists, which the API server serves from its cache.

    Outdated lists would be rare, so the test creates a hundred objects.
    """
    for number in range(100):
        name = f"cm-{number:04}"
        kube.post(path, msgspec.json.encode({"metadata": {"name": name}}))
        assert name in [found for page in kube.list_pages(path, limit=40) for found in names(page)]


def test_all_pages_of_a_list_have_the_version_of_the_first_page(kube: Kube, path: str) -> None:
    for name in "abcdef":
        kube.post(path, msgspec.json.encode({"metadata": {"name": name, "labels": {"test": "pages"}}}))
    pages = kube.list_pages(path, {"labelSelector": "test=pages"}, limit=2)
    seen = [next(pages)]
    kube.delete(f"{path}/d")
    kube.post(path, msgspec.json.encode({"metadata": {"name": "e2", "labels": {"test": "pages"}}}))
    kube.patch(f"{path}/f", b'{"metadata": {"labels": {"test": "another"}}}', MERGE_PATCH)
    seen.extend(pages)
    assert [name for page in seen for name in names(page)] == list("abcdef")
    assert len(seen) >= 3
    assert len({page.resource_version for page in seen}) == 1
