"""The server on its own, over TLS: its verdicts, metrics and log lines, and that no crowd gets more than the quota."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest
from cryptography import x509

from tests.integration.reviews import Json, card_pod, gpu_pod, patched, review_of, with_uid
from tests.processes import PATIENCE, WebhookProcess, exchange, serving

QUOTA = """
team-a: {pool: [public], quota: {M40: 8}}
team-b: {quota: {M40: 8}}
crowd: {quota: {M40: 10}}
counted: {quota: {P100: 4}}
"""
CALLERS = 64


@pytest.fixture(scope="module")
def quota(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quota") / "gpuquota.yaml"
    path.write_text(QUOTA)
    return path


@pytest.fixture(scope="module")
def server(quota: Path) -> Iterator[WebhookProcess]:
    """One server for all tests here; each has a namespace of its own in the quota."""
    with serving("--standalone", "--quota", quota) as running:
        yield running


def held_to(pod: Json) -> dict[str, list[str]]:
    """The node labels that the pod's required node affinity wants, in its only term."""
    affinity = pod["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert {line["operator"] for line in term["matchExpressions"]} == {"In"}
    return {line["key"]: line["values"] for line in term["matchExpressions"]}


def test_a_pod_within_its_quota_is_pinned_to_a_model_and_then_charged(server: WebhookProcess) -> None:
    pod = card_pod("within", "team-a")
    proposed = server.review("/mutate", pod)
    assert proposed["allowed"]
    assert proposed["auditAnnotations"]["model"] == "M40"
    pinned = patched(pod, proposed)
    assert held_to(pinned) == {"gaia.tencent.com/gpu-model": ["M40"], "gaia.tencent.com/gpu-pool": ["public"]}
    verdict = server.review("/validate", with_uid(pinned))
    assert verdict == {"uid": verdict["uid"], "allowed": True}


def test_a_pod_over_quota_is_refused_word_for_word(server: WebhookProcess) -> None:
    """What people read in kubectl and in their ReplicaSet's events, from the path that decides."""
    assert server.admit(card_pod("seven", "team-b", cards=7))["allowed"]
    pinned = card_pod("two", "team-b", cards=2)
    pinned["spec"]["nodeSelector"] = {"gaia.tencent.com/gpu-model": "M40"}
    verdict = server.review("/validate", with_uid(pinned))
    message = (
        "exceeded GPU quota: M40 in namespace team-b, requested: 2 cards, "
        "used: 7 (7 pending), limited: 8, 1 more needed"
    )
    assert not verdict["allowed"]
    assert verdict["status"] == {"status": "Failure", "code": 403, "reason": "Forbidden", "message": message}


def test_a_pod_larger_than_the_whole_limit_is_told_so_at_the_first_step(server: WebhookProcess) -> None:
    status = server.review("/mutate", card_pod("nine", "team-a", cards=9))["status"]
    assert (status["code"], status["reason"]) == (403, "Forbidden")
    assert status["message"].startswith("exceeded GPU quota: M40 in namespace team-a, requested: 9 cards, used: ")
    assert status["message"].endswith(", limited: 8, can never fit")


def test_a_malformed_pod_is_refused_with_every_field_named(server: WebhookProcess) -> None:
    pod = gpu_pod("malformed", "team-a", {"tencent.com/vcuda-core": 150})
    pod["spec"]["initContainers"] = [{"name": "i", "resources": {"limits": {"tencent.com/vcuda-core": "-1"}}}]
    for path in ("/mutate", "/validate"):
        status = server.review(path, with_uid(pod))["status"]
        assert (status["code"], status["reason"]) == (422, "Invalid")
        causes = {cause["field"]: cause["message"] for cause in status["details"]["causes"]}
        assert causes == {
            "spec.initContainers[0].resources.limits[tencent.com/vcuda-core]": (
                "-1 is negative; write a whole number from 0 up"
            ),
            "spec.containers[0].resources.limits[tencent.com/vcuda-core]": (
                "150 is more than one card but not whole cards; write 100 or 200"
            ),
        }
        assert all(sentence in status["message"] for item in causes.items() for sentence in item)


@pytest.mark.parametrize(
    "pod",
    [
        pytest.param(card_pod("free", "unlimited", cards=800), id="a namespace without a limit"),
        pytest.param(gpu_pod("web", "team-a", {"cpu": "2", "memory": "1Gi"}), id="a pod without a GPU"),
        pytest.param({"metadata": {"name": "bare"}, "spec": {"containers": [{"name": "c"}]}}, id="no resources at all"),
    ],
)
@pytest.mark.parametrize("path", ["/mutate", "/validate"])
def test_what_is_none_of_the_quotas_business_passes_untouched(server: WebhookProcess, path: str, pod: Json) -> None:
    response = server.review(path, with_uid(pod))
    assert response == {"uid": response["uid"], "allowed": True}


def test_a_crowd_of_callers_gets_exactly_what_the_quota_has(server: WebhookProcess) -> None:
    """Each caller is an API server request of its own; all reach /validate together."""
    together = Barrier(CALLERS, timeout=PATIENCE)

    def create(number: int) -> int:
        pod = card_pod(f"crowd-{number}", "crowd")
        pod["spec"]["nodeSelector"] = {"gaia.tencent.com/gpu-model": "M40"}
        asked = review_of(with_uid(pod))
        with closing(server.connect()) as connection:
            connection.connect()
            together.wait()
            answer = exchange(connection, "POST", "/validate", json.dumps(asked)).decoded()["response"]
        return 200 if answer["allowed"] else int(answer["status"]["code"])

    with ThreadPoolExecutor(CALLERS) as pool:
        codes = Counter(pool.map(create, range(CALLERS)))
    assert codes == {200: 10, 403: CALLERS - 10}


def test_a_repeated_call_is_charged_once(server: WebhookProcess) -> None:
    """The API server repeats a call whose answer it did not get; the uid tells that it is the same pod."""
    pod = with_uid(patched_of(server, card_pod("again", "counted")))
    assert all(server.review("/validate", pod)["allowed"] for _ in range(8))
    assert server.admit(card_pod("rest", "counted", cards=3))["allowed"]
    assert not server.admit(card_pod("fifth", "counted"))["allowed"]


def test_connections_are_kept_and_speak_http_1_1(server: WebhookProcess) -> None:
    with closing(server.connect()) as connection:
        first = exchange(connection, "POST", "/mutate", json.dumps(review_of(card_pod("kept", "unlimited"))))
        socket = connection.sock
        second = exchange(connection, "POST", "/mutate", json.dumps(review_of(card_pod("kept", "unlimited"))))
        assert socket is not None
        assert connection.sock is socket
        connection.request("GET", "/healthz")
        response = connection.getresponse()
        assert (response.version, response.read()) == (11, b"ok\n")
    assert (first.status, second.status) == (200, 200)
    assert "close" not in (first.headers["Connection"] or "").lower()


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_a_server_with_its_quota_read_is_healthy_and_ready(server: WebhookProcess, path: str) -> None:
    reply = server.get(path)
    assert (reply.status, reply.body) == (200, b"ok\n")


def test_metrics_count_every_admission_by_path_outcome_and_scheme(quota: Path) -> None:
    with serving("--standalone", "--quota", quota) as server:
        server.admit(card_pod("one", "team-a"))
        server.admit(gpu_pod("two", "team-a", {"nvidia.com/gpu": 1}))
        server.admit(card_pod("nine", "team-a", cards=9))
        server.admit(gpu_pod("web", "team-a", {"cpu": 1}))
        counted = {
            (path, outcome, scheme): server.metric("vcuda_admissions_total", path=path, outcome=outcome, scheme=scheme)
            for path, outcome, scheme in [
                ("/mutate", "pinned", "gpu-manager"),
                ("/validate", "charged", "gpu-manager"),
                ("/mutate", "pinned", "hami"),
                ("/validate", "charged", "hami"),
                ("/mutate", "over-quota", "gpu-manager"),
                ("/mutate", "ignored", ""),
                ("/validate", "ignored", ""),
            ]
        }
        assert set(counted.values()) == {1.0}, counted
        assert server.metric("vcuda_admissions_total") == len(counted)
        assert server.metric("vcuda_admission_duration_seconds_count", path="/mutate") == 4
        assert server.metric("vcuda_admission_duration_seconds_bucket", path="/validate", le="+Inf") == 3
        assert server.metric("vcuda_admission_duration_seconds_sum", path="/mutate") > 0


def test_metrics_tell_that_the_quota_is_valid_and_when_the_certificate_ends(server: WebhookProcess) -> None:
    assert server.metric("vcuda_quota_config_valid") == 1
    (made,) = (line["ca"] for line in server.logs() if line["event"] == "certificate made for this run")
    leaf = x509.load_pem_x509_certificate(Path(made).with_name("tls.crt").read_bytes())
    assert server.metric("vcuda_serving_certificate_expiry_seconds") == leaf.not_valid_after_utc.timestamp()
    assert server.metric("vcuda_serving_certificate_expiry_seconds") > time.time()
    assert server.get("/metrics").headers["Content-Type"].startswith("text/plain; version=0.0.4")


def test_each_admission_is_one_line_that_tells_all_about_it(quota: Path) -> None:
    with serving("--standalone", "--quota", quota) as server:
        pinned = server.review("/mutate", card_pod("logged", "team-a"), uid="u-pinned")
        server.review("/validate", with_uid(patched(card_pod("logged", "team-a"), pinned)), uid="u-charged")
        generated = gpu_pod("", "team-a", {"tencent.com/vcuda-core": 150}, generateName="job-")
        server.review("/mutate", generated, uid="u-malformed", name="")
        server.review("/validate", gpu_pod("web", "team-a", {}), uid="u-ignored")
        assert server.terminate() == 0
        lines = [line for line in server.logs() if line["event"] == "admission"]
    shown = ("uid", "path", "namespace", "pod", "model", "scheme", "outcome", "allowed")
    assert [tuple(line[key] for key in shown) for line in lines] == [
        ("u-pinned", "/mutate", "team-a", "logged", "M40", "gpu-manager", "pinned", True),
        ("u-charged", "/validate", "team-a", "logged", "M40", "gpu-manager", "charged", True),
        ("u-malformed", "/mutate", "team-a", "job-*", "", "gpu-manager", "malformed", False),
    ], "and a pod without a GPU is worth no line"
    assert all(line["ms"] > 0 for line in lines)
    assert {line["level"] for line in lines} == {"info"}
    assert "write 100 or 200" in lines[2]["message"]


def patched_of(server: WebhookProcess, pod: Json) -> Json:
    return patched(pod, server.review("/mutate", pod))
