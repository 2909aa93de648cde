"""Tests of the parsing of Secrets and webhook configurations, which any user may have edited."""

import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtensionOID
from hypothesis import given, strategies as st

from certs import parsing
from certs.parsing import SERVED, TLS_TYPE, TRUSTED, read_authorities, read_authority, read_certificates, read_serving
from certs.state import SeenSince, fingerprint, names_of
from tests.tables import cases
from vcuda.errors import BadInput
from vcuda.tls import OURS, WRITTEN_BY, ServingCertificate
from vcuda.x509 import DEVELOPMENT, Signed, is_ours, make_authority, make_leaf

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)
CA, NEXT = make_authority(NOW), make_authority(NOW)
LEAF = make_leaf(CA, DEVELOPMENT, NOW)
RSA_KEY = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
REFS = parsing.ObjectRefs(
    "vcuda-quota", "vcuda-webhook", "vcuda-webhook-ca", "vcuda-webhook-tls", frozenset({"10.0.0.7:8443"})
)
SECRETS = [line for pair in (CA, NEXT, LEAF) for line in pair.key_pem().decode().splitlines()[1:-1]]


def secret(annotations: dict[str, str] | None = None, **data: bytes) -> dict[str, Any]:
    """Return a Secret of this project. ``ca_crt`` is the value of its key ca.crt."""
    metadata = {"name": "vcuda-webhook-tls", "resourceVersion": "7", "labels": {WRITTEN_BY: OURS}}
    texts = {name.replace("_", "."): base64.b64encode(text).decode() for name, text in data.items()}
    return {"metadata": {**metadata, "annotations": annotations}, "type": TLS_TYPE, "data": texts}


NO_CERTIFICATE = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"


@cases(
    "certificate, key, fault",
    nothing=(b"", b"", "the Secret does not contain ca.crt and ca.key"),
    no_key=(CA.certificate_pem(), b"", "the Secret does not contain ca.key"),
    garbage=(b"garbage", b"garbage", "ca.crt contains no certificate"),
    key_is_garbage=(CA.certificate_pem(), b"garbage", "ca.key contains no private key"),
    key_of_another=(CA.certificate_pem(), NEXT.key_pem(), "ca.key is not the key of ca.crt"),
    an_RSA_key=(CA.certificate_pem(), RSA_KEY, "ca.key is not an ECDSA key"),
    a_leaf=(LEAF.certificate_pem(), LEAF.key_pem(), "ca.crt is not the certificate of a CA"),
)
def test_the_error_for_a_pair_that_cannot_sign_has_the_reason_and_not_the_key(
    certificate: bytes, key: bytes, fault: str
) -> None:
    with pytest.raises(parsing.UnusablePair) as raised:
        read_authority(certificate, key, "ca")
    assert str(raised.value) == fault
    assert not [line for line in SECRETS if line in str(raised.value)]


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_secret_can_be_read(certificate: bytes, key: bytes) -> None:
    assert read_authorities(secret(ca_crt=certificate, ca_key=key, next_crt=key)).current is None
    assert read_serving(secret(tls_crt=certificate, tls_key=key)).fault


def test_a_bundle_gives_each_certificate_once_and_reports_other_text() -> None:
    text = CA.certificate_pem() + NO_CERTIFICATE + CA.certificate_pem()
    assert read_certificates(text) == ((CA.certificate,), False)
    both = (CA.certificate, NEXT.certificate)
    assert read_certificates(parsing.write_certificates(both)) == (both, True)


def test_the_ca_secret_is_read_as_it_was_written() -> None:
    mark = SeenSince(fingerprint(NEXT.certificate), NOW)
    keys = {"ca_crt": CA.certificate_pem(), "ca_key": CA.key_pem()}
    next_keys = {"next_crt": NEXT.certificate_pem(), "next_key": NEXT.key_pem()}
    annotations = {TRUSTED: parsing.format_seen_since(mark) or "", SERVED: "yesterday"}
    found = read_authorities(secret(annotations, **keys, **next_keys))
    assert found.current
    assert found.next_ca
    assert (found.current.certificate, found.next_ca.certificate) == (CA.certificate, NEXT.certificate)
    assert (found.version, found.retired, found.trusted, found.served, found.faults) == ("7", (), mark, None, ())


def test_a_certificate_whose_key_is_lost_stays_trusted_as_a_retired_one() -> None:
    found = read_authorities(secret(ca_crt=CA.certificate_pem(), ca_key=b"garbage"))
    assert (found.current, found.retired) == (None, (CA.certificate,))
    assert found.faults == ("ca.key contains no private key",)


def test_a_leaf_with_a_wrong_key_is_dropped_but_its_authorities_are_read() -> None:
    found = read_serving(secret(tls_crt=LEAF.certificate_pem(), tls_key=CA.key_pem(), ca_crt=CA.certificate_pem()))
    assert (found.leaf, found.authorities) == (None, (CA.certificate,))
    assert found.fault == "tls.key is not the key of tls.crt"


def taken(certificate: bytes, directory: Path) -> tuple[bool, bool]:
    """Return whether the rotation accepts this certificate with its key, and whether the webhook does."""
    (directory / "tls.crt").write_bytes(certificate)
    (directory / "tls.key").write_bytes(LEAF.key_pem())
    try:
        serving = ServingCertificate(directory)
    except BadInput:
        serving = None
    return not read_serving(secret(tls_crt=certificate, tls_key=LEAF.key_pem())).fault, serving is not None


@cases(
    "rest, good",
    nothing=(b"", True),
    its_CA=(CA.certificate_pem(), True),
    words=(b"made by hand\n", True),
    no_certificate=(NO_CERTIFICATE, False),
    half_a_certificate=(CA.certificate_pem()[:300], False),
    a_certificate_of_half_the_length=(CA.certificate_pem()[:300] + CA.certificate_pem()[-40:], False),
)
def test_the_rotation_accepts_exactly_the_pairs_that_the_webhook_serves(
    tmp_path: Path, rest: bytes, *, good: bool
) -> None:
    """If only the rotation accepted a pair, no replica could start, and no run would repair the pair."""
    assert taken(LEAF.certificate_pem() + rest, tmp_path) == (good, good)


def test_a_certificate_with_names_that_cannot_be_read_has_none_and_is_no_authority() -> None:
    """The certificate has a name of type ediPartyName, which the cryptography library does not support."""
    key, nobody, end = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), NOW + timedelta(days=1)
    names = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, bytes.fromhex("3006a504a1020c00"))
    unsigned = x509.CertificateBuilder(nobody, nobody, key.public_key(), 1, NOW, end)
    odd = Signed(unsigned.add_extension(names, critical=False).sign(key, hashes.SHA256()), key)
    assert names_of(odd.certificate) == frozenset()
    assert not parsing.is_authority(odd.certificate)
    assert read_serving(secret(tls_crt=odd.certificate_pem(), tls_key=odd.key_pem())).leaf


def test_a_certificate_with_a_subject_that_cannot_be_read_is_not_ours() -> None:
    text = CA.certificate.public_bytes(Encoding.DER).replace(b"vcuda quota", b"vcuda \xff\xfeota")
    odd = x509.load_der_x509_certificate(text)
    assert (is_ours(odd), is_ours(odd, "issuer")) == (False, False)


def test_an_authority_with_text_after_its_certificate_still_signs() -> None:
    """Other programs ignore text after a certificate. If the rotation rejected the text, it would need a new CA."""
    assert read_authority(CA.certificate_pem() + NO_CERTIFICATE, CA.key_pem(), "ca").certificate == CA.certificate


@cases(
    "change, command",
    not_ours=({"metadata": {"name": "s", "labels": None}}, "kubectl label"),
    immutable=({"immutable": True}, "kubectl delete"),
    another_type=({"type": "Opaque"}, "kubectl delete"),
    cert_manager_s=(
        {"metadata": {"name": "s", "annotations": {"cert-manager.io/certificate-name": "x"}}},
        "kubectl get",
    ),
)
def test_a_secret_that_must_not_be_written_is_reported_with_the_command(change: dict[str, Any], command: str) -> None:
    problem = parsing.secret_problem({**secret(tls_crt=b"x"), **change}, REFS, TLS_TYPE)
    assert problem
    assert problem.command.startswith(f"{command} -n vcuda-quota secret")


def test_an_empty_secret_may_be_filled() -> None:
    empty = {**secret(), "data": None, "metadata": {"name": "s"}}
    assert parsing.secret_problem(empty, REFS, TLS_TYPE) is None


@pytest.mark.parametrize(
    ("annotation", "tool"),
    [
        ("cert-manager.io/inject-ca-from", "cert-manager"),
        ("service.beta.openshift.io/inject-cabundle", "OpenShift's service CA"),
        ("example.com/owner", ""),
    ],
)
def test_other_tools_are_recognised_by_their_annotations(annotation: str, tool: str) -> None:
    assert parsing.other_tool({"metadata": {"annotations": {annotation: "x"}}}) == tool


def test_only_webhooks_that_call_the_service_are_ours_and_others_are_named() -> None:
    service = {"namespace": "vcuda-quota", "name": "vcuda-webhook"}
    bundle = base64.b64encode(CA.certificate_pem()).decode()
    item = {
        "metadata": {"name": "vcuda-quota", "resourceVersion": "9"},
        "webhooks": [
            {"name": "away", "clientConfig": {"url": "https://example.com/x"}},
            {"name": "ours", "clientConfig": {"service": service, "caBundle": bundle}},
            {"name": "another", "clientConfig": {"service": {**service, "name": "other"}}},
            {"name": "by address", "clientConfig": {"url": "https://10.0.0.7:8443/mutate", "caBundle": "%%%"}},
        ],
    }
    found, left = parsing.read_configuration(item, "MutatingWebhookConfiguration", REFS)
    assert [(hook.index, hook.name, hook.bundle, hook.faulty, hook.server) for hook in found.hooks] == [
        (1, "ours", (CA.certificate,), False, "vcuda-webhook.vcuda-quota.svc"),
        (3, "by address", (), True, "10.0.0.7"),
    ]
    assert len(left) == 2
    assert "calls https://example.com/x" in left[0]
    assert "calls Service vcuda-quota/other" in left[1]


def test_an_annotation_with_an_invalid_time_is_ignored() -> None:
    assert read_authorities(secret({TRUSTED: "2026-13-41T00:00:00Z abc"})).trusted is None
    later = SeenSince("abc", NOW + timedelta(seconds=1))
    assert read_authorities(secret({TRUSTED: parsing.format_seen_since(later) or ""})).trusted == later
