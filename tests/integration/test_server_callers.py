"""Tests that the webhook with ``--client-ca`` answers API servers and probes, and rejects other callers."""

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.x509 import load_pem_x509_certificate

from tests.integration.reviews import card_pod, review_of
from tests.processes import Reply, WebhookProcess, eventually, serving
from vcuda.tls import leaf_files, write_files
from vcuda.x509 import Signed, make_authority, make_client
from webhook.cli import main

NOW = datetime.now(UTC)
POD = json.dumps(review_of(card_pod("pod", "team-a")))
GUARDED = ["POST /mutate", "POST /validate", "POST /quota", "GET /mutate", "GET /nowhere"]
REJECTED = (ssl.SSLError, ConnectionResetError, BrokenPipeError)
"""The errors of a client whose certificate is from another CA. With TLS 1.3 they occur only when the client reads."""

EXPIRY = "vcuda_client_certificate_expiry_seconds"
NO_PAIR, KNOWN, OTHER_NAME, STRANGER, NEXT = None, "known", "other-name", "stranger", "next"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base, known = tmp_path_factory.mktemp("pairs"), make_authority(NOW)

    def make(name: str, authority: Signed, common_name: str = "apiserver") -> None:
        write_files(base / name, leaf_files(make_client(authority, common_name, NOW), "client certificate"))
        (base / name / "ca.crt").write_bytes(authority.certificate_pem())

    make(KNOWN, known)
    make(OTHER_NAME, known, "somebody")
    make(STRANGER, make_authority(NOW))
    make(NEXT, make_authority(NOW))
    return base


@contextmanager
def guarded(directory: Path, pairs: Path, *flags: str) -> Iterator[WebhookProcess]:
    (directory / "gpuquota.yaml").write_text("team-a: {quota: {M40: 8}}")
    trust(directory, pairs, KNOWN)
    ours = ("--standalone", "--quota", directory / "gpuquota.yaml", "--client-ca", directory / "client-ca.crt")
    with serving(*ours, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, pairs: Path) -> Iterator[WebhookProcess]:
    with guarded(tmp_path_factory.mktemp("guarded"), pairs, "--client-name", "apiserver") as running:
        yield running


def trust(directory: Path, pairs: Path, *names: str) -> None:
    """Replace the file with the CAs of client certificates in one step, as the kubelet would do."""
    fresh = directory / "fresh"
    fresh.write_bytes(b"".join((pairs / name / "ca.crt").read_bytes() for name in names))
    fresh.replace(directory / "client-ca.crt")


def ask(server: WebhookProcess, pairs: Path, line: str, pair: str | None) -> Reply:
    made = server.await_log("certificate made for this run")["ca"]
    server.tls = ssl.create_default_context(cafile=made)
    if pair:
        server.tls.load_cert_chain(pairs / pair / "tls.crt", pairs / pair / "tls.key")
    method, path = line.split()
    return server.send(method, path, POD if method == "POST" else None)


@pytest.mark.parametrize("line", GUARDED)
def test_a_review_is_answered_only_with_a_certificate_of_the_client_ca_and_the_name(
    server: WebhookProcess, pairs: Path, line: str
) -> None:
    assert ask(server, pairs, line, NO_PAIR).status == HTTPStatus.UNAUTHORIZED
    assert ask(server, pairs, line, OTHER_NAME).status == HTTPStatus.FORBIDDEN
    with pytest.raises(REJECTED):
        ask(server, pairs, line, STRANGER)
    known = ask(server, pairs, line, KNOWN).status
    assert known not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    assert known == HTTPStatus.OK or line.startswith("GET")


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_probes_and_scrapes_need_no_certificate(server: WebhookProcess, pairs: Path, path: str) -> None:
    assert ask(server, pairs, f"GET {path}", NO_PAIR).status == HTTPStatus.OK


def test_metrics_need_a_certificate_only_with_the_flag_and_report_its_expiry(tmp_path: Path, pairs: Path) -> None:
    with guarded(tmp_path, pairs, "--protect-metrics") as server:
        assert ask(server, pairs, "GET /metrics", NO_PAIR).status == HTTPStatus.UNAUTHORIZED
        assert ask(server, pairs, "GET /healthz", NO_PAIR).status == HTTPStatus.OK
        for pair in (KNOWN, OTHER_NAME):
            ends = load_pem_x509_certificate((pairs / pair / "tls.crt").read_bytes()).not_valid_after_utc
            assert ask(server, pairs, "GET /metrics", pair).samples(EXPIRY, {}) == [ends.timestamp()]
            assert ask(server, pairs, "POST /mutate", pair).decoded()["response"]["allowed"]


def answered(server: WebhookProcess, pairs: Path, pair: str) -> bool:
    try:
        return ask(server, pairs, "POST /mutate", pair).status == HTTPStatus.OK
    except REJECTED:
        return False


def test_a_new_client_ca_is_used_without_a_restart_and_a_partial_file_never(tmp_path: Path, pairs: Path) -> None:
    failures = "vcuda_serving_certificate_reload_failures_total"
    with guarded(tmp_path, pairs) as server:
        assert not answered(server, pairs, NEXT)
        trust(tmp_path, pairs, KNOWN, NEXT)
        eventually(lambda: answered(server, pairs, NEXT))
        assert answered(server, pairs, KNOWN), "both CAs during a rotation"
        (tmp_path / "client-ca.crt").write_bytes((pairs / NEXT / "ca.crt").read_bytes()[:100])
        eventually(lambda: ask(server, pairs, "GET /metrics", NO_PAIR).samples(failures, {}) == [1.0])
        assert answered(server, pairs, NEXT)
        trust(tmp_path, pairs, NEXT)
        eventually(lambda: not answered(server, pairs, KNOWN))
        assert answered(server, pairs, NEXT)


@pytest.mark.parametrize("flag", ["--client-name=apiserver", "--protect-metrics"])
def test_a_flag_without_effect_is_bad_input(flag: str) -> None:
    result = CliRunner().invoke(main, ["serve", flag])
    assert (result.exit_code, "need --client-ca FILE" in result.stderr) == (2, True)
