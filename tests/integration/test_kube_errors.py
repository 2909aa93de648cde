"""Tests that our API client raises a separate exception for each kind of failure. The answers are scripted."""

import asyncio
from pathlib import Path

import kmock
import pytest
import urllib3
from kubernetes.client import ApiClient, Configuration

from tests.integration.scripted import Answer, Script, forever, item, page, status, stream, tear, torn, write_kubeconfig
from vcuda.errors import ApiError, BadInput, Conflict, Forbidden, Gone, ListOverdue, NotFound, TooLarge, Unavailable
from vcuda.kube import JSON_PATCH, MERGE_PATCH, Kube
from vcuda.kube.connection import KEPT_SECONDS, ApiRequest, Sender, loader
from vcuda.kube.pages import MAX_OBJECT_BYTES

PATH = "/api/v1/namespaces/ns/configmaps"


async def drip() -> bytes:
    await asyncio.sleep(0.05)
    return b" "


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        *((code, ApiError) for code in (400, 422)),
        (403, Forbidden),
        (404, NotFound),
        (409, Conflict),
        (410, Gone),
        *((code, Unavailable) for code in (429, 500, 503, 504)),
    ],
)
def test_an_error_status_becomes_its_error_with_the_servers_message(
    kube: Kube, script: Script, code: int, kind: type[Exception]
) -> None:
    script.answers.append(status(code, "the very reason"))
    with pytest.raises(kind, match=f"the very reason .*HTTP {code}") as caught:
        kube.get(PATH)
    assert type(caught.value) is kind
    assert getattr(caught.value, "status", code) == code


def test_an_error_has_the_causes_of_its_status(kube: Kube, script: Script) -> None:
    causes = [{"reason": "NamespaceTerminating", "message": "namespace ns is being terminated", "field": "f"}]
    script.answers.append(Answer({"message": "forbidden", "details": {"causes": causes}}, status=403))
    with pytest.raises(ApiError) as caught:
        kube.post(PATH, b"{}")
    assert caught.value.has_cause("NamespaceTerminating")
    assert not caught.value.has_cause("DisruptionBudget")


def test_an_error_of_a_plain_proxy_keeps_its_first_words(kube: Kube, script: Script) -> None:
    script.answers.append(Answer(b"<html>bad gateway \xff" + b"x" * 5000, status=502))
    with pytest.raises(Unavailable, match="<html>bad gateway") as caught:
        kube.get(PATH)
    assert len(str(caught.value)) < 400


def test_a_redirect_is_not_followed(kube: Kube, script: Script) -> None:
    """Otherwise the client would send its token to another host."""
    script.answers.append(Answer(b"", status=302, headers={"Location": "/elsewhere"}))
    with pytest.raises(ApiError, match="HTTP 302"):
        kube.get(PATH)
    assert len(script.seen) == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(torn(b'{"kind":'), id="chunked body cut short"),
        pytest.param(
            Answer((b'{"kind":', tear), headers={"Content-Length": "100"}), id="body shorter than its Content-Length"
        ),
        pytest.param(stream(b"{", forever), id="body that stops"),
        pytest.param(stream(*[drip] * 400), id="body that drips for 20 seconds"),
        pytest.param(Answer(forever), id="no answer at all"),
    ],
)
def test_an_incomplete_or_late_answer_raises_an_error(kube: Kube, script: Script, answer: Answer) -> None:
    script.answers.append(answer)
    with pytest.raises(Unavailable, match=f"GET {PATH}"):
        kube.get(PATH, timeout=0.4)


def test_no_request_is_repeated_after_a_failure(kube: Kube, script: Script) -> None:
    """A write whose answer was lost may be stored. So the caller must read the object before it retries."""
    script.answers.append(torn(b"{"))
    with pytest.raises(Unavailable):
        kube.post(PATH, b"{}")
    assert len(script.seen) == 1


@pytest.mark.parametrize("kind", [JSON_PATCH, MERGE_PATCH])
def test_a_body_arrives_byte_for_byte_under_its_content_type(kube: Kube, script: Script, kind: str) -> None:
    script.answers.append(Answer({}))
    kube.patch(f"{PATH}/a", '[{"op":"test"}, "é"]'.encode(), kind, {"fieldManager": "vcuda & co"})
    request = script.seen[0]
    assert request.body == '[{"op":"test"}, "é"]'.encode()
    assert request.headers["Content-Type"] == kind
    assert request.params["fieldManager"] == "vcuda & co"


def asked_for(request: kmock.Request) -> str:
    assert request._raw_request is not None
    return str(request._raw_request.raw_path)


def test_a_server_below_a_path_is_called_there(server: str, script: Script, tmp_path: Path) -> None:
    """The URLs of clusters in Rancher have a path."""
    write_kubeconfig(tmp_path / "kubeconfig", f"{server}/k8s/clusters/c-1/", {"token": "t"})
    script.answers.append(Answer({}))
    Kube.connect(tmp_path / "kubeconfig").get(PATH, {"limit": 1})
    assert [asked_for(each) for each in script.seen] == [f"/k8s/clusters/c-1{PATH}?limit=1"]


def test_a_proxy_is_used_to_reach_the_server(server: str, script: Script, tmp_path: Path) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", "http://kubernetes.invalid:8080", {"token": "t"}, {"proxy-url": server})
    script.answers.append(Answer({}))
    Kube.connect(tmp_path / "kubeconfig").put(f"{PATH}/a", b"{}")
    assert [asked_for(each) for each in script.seen] == [f"http://kubernetes.invalid:8080{PATH}/a"]


@pytest.fixture
def token(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("old")
    return tmp_path / "token"


@pytest.fixture
def by_file(server: str, token: Path, tmp_path: Path) -> Kube:
    write_kubeconfig(tmp_path / "kubeconfig", server, {"tokenFile": str(token)})
    return Kube.connect(tmp_path / "kubeconfig")


def test_an_expired_token_is_read_again_and_the_request_is_retried(script: Script, token: Path, by_file: Kube) -> None:
    """Kubernetes' Python client alone would read a token file again only after a minute, or never."""
    token.write_text("new\n")
    script.answers.extend([status(401, "Unauthorized"), Answer({"fine": True})])
    assert by_file.put(f"{PATH}/a", b"{}") == b'{"fine": true}'
    assert [request.headers["Authorization"] for request in script.seen] == ["Bearer old", "Bearer new"]


def test_credentials_are_read_once_a_second_and_after_each_401(script: Script, kubeconfig: Path) -> None:
    configuration = Configuration(retries=False)
    looked, now, load = [0], [0.0], loader(kubeconfig, None)
    load(configuration)
    configuration.refresh_api_key_hook = lambda _: looked.append(0)  # type: ignore[assignment]  # the client declares no type for the hook
    sender = Sender(ApiClient(configuration), load, lambda: now[0])

    def send(*answers: Answer) -> int:
        before = len(looked)
        script.answers.extend(answers)
        sender.send(ApiRequest("GET", PATH), urllib3.Timeout(5)).drain_conn()
        return len(looked) - before

    assert [send(Answer({})) for _ in range(3)] == [1, 0, 0]
    now[0] += KEPT_SECONDS
    assert [send(Answer({})) for _ in range(2)] == [1, 0]
    assert send(status(401, "Unauthorized")) > 0


def test_a_401_without_newer_credentials_is_an_error_at_once(kube: Kube, script: Script) -> None:
    script.answers.append(status(401, "Unauthorized"))
    with pytest.raises(ApiError, match="Unauthorized"):
        kube.get(PATH)
    assert len(script.seen) == 1


def test_a_missing_token_file_is_reported(script: Script, token: Path, by_file: Kube) -> None:
    token.unlink()
    script.answers.append(status(401, "Unauthorized"))
    with pytest.raises(Unavailable, match="credentials for the API server cannot be read"):
        by_file.get(PATH)


def test_an_empty_list_may_have_null_items(kube: Kube, script: Script) -> None:
    """Go encodes an empty (nil) list as null."""
    script.answers.append(Answer({"metadata": {"resourceVersion": "3"}, "items": None}))
    assert [len(one.items) for one in kube.list_pages(PATH)] == [0]


@pytest.mark.parametrize(
    "body", [b'{"metadata": {"resourceVersion": "3"}, "items": [{"meta', b"<html>", b'{"items": []}', b""]
)
def test_an_answer_that_is_not_a_list_is_an_error(kube: Kube, script: Script, body: bytes) -> None:
    script.answers.append(Answer(body))
    with pytest.raises(Unavailable, match="the answer is not a list"):
        list(kube.list_pages(PATH))


def test_a_page_that_is_too_large_is_requested_again_with_fewer_objects(kube: Kube, script: Script) -> None:
    """The client closes the connection, because it does not read the rest of the large page."""

    async def go_on() -> bytes:
        return b"x" * 2**20

    script.answers.append(stream(b'{"kind":"List","metadata":{"resourceVersion":"7"},"items":[{"a":"', *[go_on] * 1000))
    script.answers += [page(7, item("a", 1), token="t"), page(7, item("b", 2))]
    assert [len(one.items) for one in kube.list_pages(PATH)] == [1, 1]
    asked = [(request.params["limit"], request.params.get("continue")) for request in script.seen]
    assert asked == [("32", None), ("8", None), ("32", "t")]


def test_an_object_that_is_too_large_is_an_error_that_names_it(kube: Kube, script: Script) -> None:
    script.answers.append(Answer(b"x" * (MAX_OBJECT_BYTES + 1)))
    with pytest.raises(TooLarge, match=f"GET {PATH}/a: the answer has more than {MAX_OBJECT_BYTES} bytes"):
        kube.get(f"{PATH}/a")


def test_a_list_that_does_not_end_in_time_is_an_error_that_says_so(kube: Kube, script: Script) -> None:
    script.answers += [page(7, item("a", 1), token="t"), Answer(forever)]
    with pytest.raises(ListOverdue, match=rf"LIST {PATH} took longer than 0\.5 s"):
        list(kube.list_pages(PATH, seconds=0.5))


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        "{}",
        "a: [",
        "clusters: 7",
        '{"current-context": "x", "contexts": [{"name": "y"}]}',
        "just words",
    ],
)
def test_an_unusable_kubeconfig_is_bad_input(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match=f"No usable kubeconfig at {path}"):
        Kube.connect(path)


def test_without_a_kubeconfig_the_default_place_is_read(
    script: Script, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    script.answers.append(Answer({}))
    assert Kube.connect().get("/version") == b"{}"


def test_in_a_pod_the_service_account_is_used_unless_a_context_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    with pytest.raises(BadInput, match="service account cannot be read"):
        Kube.connect()
    with pytest.raises(BadInput, match=r"/nowhere \(context there\)"):
        Kube.connect(context="there")
