"""Tests of the certificates that the CA issues, and of names and times for which it issues no certificate."""

import string
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from ipaddress import IPv4Address, ip_address

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given, settings, strategies as st

from tests.tables import cases
from vcuda.x509 import (
    DEVELOPMENT,
    Address,
    Names,
    Signed,
    make_authority,
    make_leaf,
    parse_dns_name,
    parse_ip,
    parse_label,
    service_names,
)

NOW = datetime(2026, 11, 21, 8, 0, 30, 999_999, tzinfo=UTC)
START = datetime(2026, 11, 21, 7, 55, 30, tzinfo=UTC)
END = NOW.replace(microsecond=0) + timedelta(days=90)

labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True).map(lambda label: f"x{label}")
dns_names = st.lists(labels, min_size=1, max_size=4).map(".".join)
addresses = st.ip_addresses()
some_names = st.builds(
    Names, st.lists(dns_names, max_size=4).map(tuple), st.lists(addresses, max_size=4).map(tuple)
).filter(bool)


@pytest.fixture(scope="module")
def authority() -> Signed:
    return make_authority(NOW)


@pytest.fixture(scope="module")
def leaf(authority: Signed) -> Signed:
    return make_leaf(authority, DEVELOPMENT, NOW)


@pytest.fixture
def signed(request: pytest.FixtureRequest, authority: Signed, leaf: Signed) -> Signed:
    return {"authority": authority, "leaf": leaf}[request.param]


def verify(leaf: Signed, authority: Signed, subject: str, at: datetime) -> None:
    """Verify the certificate chain as a TLS client does. Raises VerificationError if the chain is invalid."""
    name: verification.Subject
    try:
        name = x509.IPAddress(ip_address(subject))
    except ValueError:
        name = x509.DNSName(subject)
    store = verification.Store([authority.certificate])
    builder = verification.PolicyBuilder().store(store).time(at.replace(tzinfo=None))
    builder.build_server_verifier(name).verify(leaf.certificate, [])


def set_bits(usage: x509.KeyUsage) -> set[str]:
    """Return the set bits of a key usage, without encipher_only and decipher_only, which need key_agreement."""
    bits = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment")
    return {bit for bit in (*bits, "key_agreement", "key_cert_sign", "crl_sign") if getattr(usage, bit)}


@pytest.mark.parametrize(
    ("signed", "ca", "path_length", "usages"),
    [("authority", True, 0, {"key_cert_sign", "crl_sign"}), ("leaf", False, None, {"digital_signature"})],
    indirect=["signed"],
)
def test_constraints_and_usages_are_critical_and_fit_each_certificate(
    signed: Signed, ca: bool, path_length: int | None, usages: set[str]
) -> None:
    constraints = signed.certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = signed.certificate.extensions.get_extension_for_class(x509.KeyUsage)
    assert (constraints.value.ca, constraints.value.path_length, set_bits(usage.value)) == (ca, path_length, usages)
    assert constraints.critical
    assert usage.critical


def test_only_the_leaf_has_an_extended_usage_which_is_only_server_auth(authority: Signed, leaf: Signed) -> None:
    usage = leaf.certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    assert list(usage.value) == [ExtendedKeyUsageOID.SERVER_AUTH]
    with pytest.raises(x509.ExtensionNotFound):
        authority.certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage)


@pytest.mark.parametrize("signed", ["authority", "leaf"], indirect=True)
def test_the_authority_key_identifier_names_the_key_of_the_authority(signed: Signed, authority: Signed) -> None:
    expected = x509.SubjectKeyIdentifier.from_public_key(authority.key.public_key()).digest
    found = signed.certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier)
    assert found.value.key_identifier == expected


@pytest.mark.parametrize("signed", ["authority", "leaf"], indirect=True)
def test_each_certificate_has_its_own_p256_key_and_identifies_it(signed: Signed) -> None:
    public = signed.certificate.public_key()
    found = signed.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert isinstance(public.curve, ec.SECP256R1)
    assert public == signed.key.public_key()
    assert found.value == x509.SubjectKeyIdentifier.from_public_key(public)


@pytest.mark.parametrize(("signed", "days"), [("authority", 730), ("leaf", 90)], indirect=["signed"])
def test_validity_starts_five_minutes_before_now_and_lasts_its_life_from_now(signed: Signed, days: int) -> None:
    """The times in certificates are whole seconds, so the start and the end are rounded down."""
    assert signed.certificate.not_valid_before_utc == START
    assert signed.expires == NOW.replace(microsecond=0) + timedelta(days=days)


def test_a_time_in_another_zone_is_the_same_moment() -> None:
    elsewhere = NOW.astimezone(timezone(timedelta(hours=8)))
    assert make_authority(elsewhere).certificate.not_valid_before_utc == START


def test_a_leaf_never_outlives_its_authority() -> None:
    authority = make_authority(NOW, timedelta(days=10))
    assert make_leaf(authority, DEVELOPMENT, NOW).expires == authority.expires


def test_serials_are_random_and_have_at_most_20_octets() -> None:
    """A bit is not constant if it is 1 in one serial number and 0 in another. The test checks all 159 bits."""
    serials = [make_authority(NOW).certificate.serial_number for _ in range(64)]
    ever, always = 0, 2**159 - 1
    for serial in serials:
        ever, always = ever | serial, always & serial
    assert len(set(serials)) == len(serials)
    assert min(serials) > 0
    assert (ever, always) == (2**159 - 1, 0)


def test_two_authorities_differ_by_name() -> None:
    """During a rotation, a caBundle has the old and the new CA. A client finds a certificate's issuer by its name."""
    assert make_authority(NOW).certificate.subject != make_authority(NOW).certificate.subject


@given(names=some_names)
@settings(max_examples=50)
def test_the_leaf_has_exactly_the_requested_names(names: Names) -> None:
    certificate = make_leaf(make_authority(NOW), names, NOW).certificate
    held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert tuple(held.get_values_for_type(x509.DNSName)) == names.dns
    assert tuple(held.get_values_for_type(x509.IPAddress)) == names.addresses
    assert len(held) == len(names.dns) + len(names.addresses)


@pytest.mark.parametrize("subject", ["localhost", "127.0.0.1", "::1"])
@pytest.mark.parametrize("at", [START, NOW, END], ids=["the first second", "at issue", "the last second"])
def test_a_client_accepts_the_chain_during_its_whole_validity(
    authority: Signed, leaf: Signed, subject: str, at: datetime
) -> None:
    verify(leaf, authority, subject, at)


@cases(
    "subject, at",
    before_the_start=("localhost", START - timedelta(seconds=1)),
    after_the_end=("localhost", END + timedelta(seconds=1)),
    another_name=("example.com", NOW),
    another_address=("127.0.0.2", NOW),
)
def test_a_client_rejects_the_chain_at_other_times_and_for_other_names(
    authority: Signed, leaf: Signed, subject: str, at: datetime
) -> None:
    with pytest.raises(verification.VerificationError):
        verify(leaf, authority, subject, at)


def test_a_client_rejects_a_leaf_of_another_authority(leaf: Signed) -> None:
    with pytest.raises(verification.VerificationError):
        verify(leaf, make_authority(NOW), "localhost", NOW)


@cases(
    "names, now, life, sentence",
    no_names=(Names(), NOW, timedelta(1), "at least one DNS name"),
    no_life=(DEVELOPMENT, NOW, timedelta(0), "must be positive"),
    authority_expired=(DEVELOPMENT, NOW + timedelta(730), timedelta(1), "cannot sign"),
    a_CA_that_is_not_valid_yet=(DEVELOPMENT, NOW - timedelta(1), timedelta(1), "cannot sign"),
)
def test_a_leaf_that_no_client_could_accept_is_not_issued(
    authority: Signed, names: Names, now: datetime, life: timedelta, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_leaf(authority, names, now, life)


def test_a_time_without_zone_is_rejected() -> None:
    """A time without a zone might be local time. Read as UTC, it could be wrong by hours."""
    with pytest.raises(ValueError, match="must have a time zone"):
        make_authority(NOW.replace(tzinfo=None))


def test_printing_a_pair_shows_no_key(leaf: Signed) -> None:
    assert "key" not in repr(leaf).lower()


def test_a_service_has_four_names() -> None:
    assert service_names("vcuda-webhook", "vcuda-system").dns == (
        "vcuda-webhook",
        "vcuda-webhook.vcuda-system",
        "vcuda-webhook.vcuda-system.svc",
        "vcuda-webhook.vcuda-system.svc.cluster.local",
    )


def test_joined_names_keep_their_order_without_duplicates() -> None:
    joined = Names(("b", "a", "b")) + Names(("a", "c"), (IPv4Address("10.0.0.1"),) * 2)
    assert joined == Names(("b", "a", "c"), (IPv4Address("10.0.0.1"),))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((name, name) for name in ("localhost", "*.example.com", "xn--bcher-kva.example", "a" * 63)),
        ("GPU.Example.com", "gpu.example.com"),
        (".".join(["a" * 49] * 5), ".".join(["a" * 49] * 5)),  # 249 characters; the maximum is 253
    ],
)
def test_valid_dns_names_are_accepted(text: str, name: str) -> None:
    assert parse_dns_name(text) == name


NO_DNS_NAMES = ("", "a.", "a..b", "a_b", "-a", "*", "a.*.b", "a\n", "a" * 64, "https://a")


@pytest.mark.parametrize(
    ("parse", "text", "sentence"),
    [
        *((parse_dns_name, text, "not a DNS name") for text in NO_DNS_NAMES),
        (parse_dns_name, "bücher.example", "xn--"),
        (parse_dns_name, ".".join(["a" * 50] * 5), "at most 253"),  # 254 characters
        *((parse_dns_name, text, "must be given with --ip") for text in ("10.0.0.1", "::1")),
        *((parse_ip, text, "must be an IP address") for text in ("localhost", "10.0.0.0/8")),
        (parse_ip, "fe80::1%eth0", "such as %eth0"),
    ],
)
def test_invalid_names_and_addresses_are_rejected(parse: Callable[[str], object], text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse(text)


@given(address=addresses)
def test_every_address_is_accepted_as_it_prints(address: Address) -> None:
    assert parse_ip(str(address)) == address


@given(text=st.text(string.ascii_letters + string.digits + "-._ ", max_size=70))
def test_a_label_is_a_valid_name_of_a_namespace(text: str) -> None:
    """By RFC 1123, a label has 1 to 63 lower-case letters, digits and '-', and does not begin or end with '-'."""
    allowed = set(string.ascii_lowercase + string.digits + "-")
    if 1 <= len(text) <= 63 and set(text) <= allowed and text.strip("-") == text:
        assert parse_label(text) == text
    else:
        with pytest.raises(ValueError, match="must be a name of 1 to 63"):
            parse_label(text)
