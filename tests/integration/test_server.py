"""Tests of ``vcuda-webhook serve --standalone`` over TLS: its answers, metrics, logs and concurrent callers."""

import json
import os
import signal
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest
from cryptography import x509

from tests.integration.reviews import card_pod, gpu_pod, patched, pinned, review_of, with_uid
from tests.processes import PATIENCE, WebhookProcess, exchange, serving

QUOTA = """
team-a: {pool: [public], quota: {M40: 8}}
crowd: {quota: {M40: 10}}
"""
CALLERS = 64


@pytest.fixture(scope="module")
def quota(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quota") / "gpuquota.yaml"
    path.write_text(QUOTA)
    return path


@pytest.fixture(scope="module")
def server(quota: Path) -> Iterator[WebhookProcess]:
    with serving("--standalone", "--quota", quota) as running:
        yield running


def test_a_crowd_of_callers_gets_exactly_the_quota(server: WebhookProcess) -> None:
    together = Barrier(CALLERS, timeout=PATIENCE)

    def create(number: int) -> int:
        asked = review_of(with_uid(pinned(card_pod(f"crowd-{number}", "crowd"))))
        with closing(server.connect()) as connection:
            connection.connect()
            together.wait()
            answer = exchange(connection, "POST", "/validate", json.dumps(asked)).decoded()["response"]
        return 200 if answer["allowed"] else int(answer["status"]["code"])

    with ThreadPoolExecutor(CALLERS) as pool:
        codes = Counter(pool.map(create, range(CALLERS)))
    assert codes == {200: 10, 403: CALLERS - 10}


def test_metrics_count_every_admission_by_path_outcome_and_scheme(quota: Path) -> None:
    with serving("--standalone", "--quota", quota) as server:
        server.admit(card_pod("one", "team-a"))
        server.admit(gpu_pod("two", "team-a", {"nvidia.com/gpu": 1}))
        server.admit(card_pod("nine", "team-a", cards=9))
        server.admit(gpu_pod("web", "team-a", {"cpu": 1}))
        for path, outcome, scheme in (
            ("/mutate", "pinned", "gpu-manager"),
            ("/validate", "charged", "gpu-manager"),
            ("/mutate", "pinned", "nvidia.com/gpu"),
            ("/validate", "charged", "nvidia.com/gpu"),
            ("/mutate", "over-quota", "gpu-manager"),
            ("/mutate", "ignored", ""),
            ("/validate", "ignored", ""),
        ):
            assert server.samples("vcuda_admissions_total", path=path, outcome=outcome, scheme=scheme) == [1.0]
        assert server.metric("vcuda_admissions_total") == 7
        assert server.samples("vcuda_rejections_total", namespace="*", reason="over-quota") == [1.0]
        assert server.metric("vcuda_admission_duration_seconds_count", path="/mutate") == 4
        assert server.metric("vcuda_admission_duration_seconds_bucket", path="/validate", le="+Inf") == 3
        assert server.metric("vcuda_admission_duration_seconds_sum", path="/mutate") > 0


def test_metrics_report_whether_the_quota_is_valid_and_when_the_certificate_expires(server: WebhookProcess) -> None:
    assert server.metric("vcuda_quota_config_valid") == 1
    (made,) = (line["ca"] for line in server.logs() if line["event"] == "certificate made for this run")
    leaf = x509.load_pem_x509_certificate(Path(made).with_name("tls.crt").read_bytes())
    assert server.metric("vcuda_serving_certificate_expiry_seconds") == leaf.not_valid_after_utc.timestamp()
    assert server.metric("vcuda_serving_certificate_expiry_seconds") > time.time()
    assert server.get("/metrics").headers["Content-Type"].startswith("text/plain; version=0.0.4")


def test_the_lines_of_gunicorn_are_structured_too(quota: Path) -> None:
    with serving("--standalone", "--quota", quota) as server:
        os.kill(server.worker(), signal.SIGKILL)
        told = server.await_log("gunicorn")
        assert (told["level"], "SIGKILL" in told["message"]) == ("error", True)
        assert server.terminate() == 0
        assert all(line.startswith("{") for line in server.output().splitlines())


def test_each_admission_is_one_log_line_with_all_details(quota: Path) -> None:
    with serving("--standalone", "--quota", quota) as server:
        pod = card_pod("logged", "team-a")
        proposed = server.review("/mutate", pod, uid="u-pinned")
        server.review("/validate", with_uid(patched(pod, proposed)), uid="u-charged")
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
    ], "a pod without a GPU must log no line"
    assert all(line["ms"] > 0 for line in lines)
    assert {line["level"] for line in lines} == {"info"}
    assert "write 100 or 200" in lines[2]["message"]


# Go's http.Transport, by which the API server calls webhooks, closes connections that were idle for 90 s. This is the
# default of SetTransportDefaults in k8s.io/apimachinery.
API_SERVER_IDLE_SECONDS = 90.0


@pytest.mark.slow
@pytest.mark.timeout(API_SERVER_IDLE_SECONDS + 120)
def test_a_connection_stays_open_longer_than_the_api_servers_idle_timeout(server: WebhookProcess) -> None:
    with closing(server.connect()) as used, closing(server.connect()) as unused:
        unused.connect()
        assert exchange(used, "GET", "/healthz").status == 200
        for connection, seconds in ((used, API_SERVER_IDLE_SECONDS + 1), (unused, 0.1)):
            assert isinstance(connection.sock, ssl.SSLSocket)
            kept = connection.sock
            kept.settimeout(seconds)
            # A server sends nothing on an idle connection. So recv() returns before its timeout only if the server
            # closes the connection.
            with pytest.raises(TimeoutError):
                kept.recv(1)
            kept.settimeout(10)
            assert exchange(connection, "GET", "/healthz").status == 200
            assert connection.sock is kept
