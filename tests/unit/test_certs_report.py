"""Tests of the report of `vcuda-certs status`, including the problems that a person must fix."""

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from certs.parsing import ObjectRefs
from certs.report import Report, certificate_table, document, report_on
from certs.state import Authorities, Certificates, Problem, Serving
from certs.steps import RotationPolicy
from tests.rotation_world import NAMES, POLICY, START, World, healthy
from vcuda.x509 import Names, Signed, make_authority, make_leaf, service_names

REFS = ObjectRefs("vcuda-quota", "vcuda-webhook", "vcuda-webhook-ca", "vcuda-webhook-tls")


def report(world: World, policy: RotationPolicy = POLICY) -> Report:
    return report_on(world.read(world.now), REFS, world.now(), policy, "rotate-now")


def test_a_healthy_state_has_no_problem() -> None:
    found = report(healthy())
    assert found.problems == ()
    assert {call.fault for call in found.calls} == {""}


@pytest.mark.parametrize(
    ("left", "shown"),
    [
        (timedelta(days=2, hours=23), "2 days"),
        (timedelta(days=1), "1 day"),
        (timedelta(hours=23, minutes=59), "23 hours"),
        (timedelta(minutes=59), "59 minutes"),
        (timedelta(seconds=59), "less than a minute"),
        (timedelta(), "expired less than a minute ago"),
        (timedelta(minutes=-90), "expired 1 hour ago"),
        (timedelta(days=-3), "expired 3 days ago"),
    ],
)
def test_the_time_left_is_in_days_hours_or_minutes(left: timedelta, shown: str) -> None:
    world = healthy()
    world.time = world.leaf.expires - left
    leaf = next(row for row in report(world).rows if row.where == "secret/vcuda-webhook-tls")
    assert leaf.time_left == shown


@pytest.mark.parametrize("days", [0, 61], ids=["nothing is due", "a leaf is due"])
def test_a_locked_configuration_is_a_problem_for_a_person(days: int) -> None:
    world, lock = healthy(), Problem("vcuda-quota is without our label", "kubectl label")
    world.lock(lock)
    world.time += timedelta(days=days)
    assert report(world).problems == (lock,)


def unready(world: World) -> None:
    for pod in world.pods:
        pod.ready = False


def unregister(world: World) -> None:
    world.put(configurations=())


NOBODY = {
    "no endpoint": (lambda world: world.pods.clear(), "no endpoint is ready", "get pods,endpointslices"),
    "none ready": (unready, "no endpoint is ready", "get pods,endpointslices"),
    "no configuration": (unregister, "no webhook configuration with the label", "kubectl label"),
}


@pytest.mark.parametrize(("change", "text", "command"), NOBODY.values(), ids=NOBODY.keys())
def test_missing_callers_or_endpoints_are_a_problem_for_a_person(
    change: Callable[[World], None], text: str, command: str
) -> None:
    """For ten minutes after a certificate was issued no problem is reported, because pods may be starting."""
    world = healthy()
    change(world)
    world.time += timedelta(minutes=9)
    assert report(world).problems == ()
    world.time += timedelta(minutes=2)
    [problem] = report(world).problems
    assert text in problem.text
    assert command in problem.command
    of_another_tool(world, make_authority(START))
    assert problem in report(world).problems


def of_another_tool(world: World, root: Signed) -> None:
    """Let another tool manage all certificates: every caBundle contains only the tool's root CA."""
    world.put_hooks(bundle=(root.certificate,))
    world.put(tool="cert-manager", authorities=Authorities(), serving=Serving())


@pytest.mark.parametrize(
    ("dns", "trusted"),
    [
        pytest.param(NAMES.dns, True, id="the Service's names"),
        pytest.param(("*.vcuda-quota.svc",), True, id="a wildcard"),
        pytest.param(("VCUDA-webhook.vcuda-quota.SVC",), True, id="in capitals"),
        pytest.param(("*.svc",), False, id="a wildcard of another depth"),
        pytest.param(service_names("vcuda-webhook", "gpu").dns, False, id="another namespace"),
    ],
)
def test_a_leaf_is_trusted_only_for_the_requested_name(dns: tuple[str, ...], *, trusted: bool) -> None:
    world, root = healthy(), make_authority(START)
    of_another_tool(world, root)
    world.put_hooks(server="vcuda-webhook.vcuda-quota.svc")
    world.serve(make_leaf(root, Names(dns), START).certificate)
    found = report(world)
    assert {call.trusted for call in found.calls} == {trusted}
    assert bool(found.problems) is not trusted
    if not trusted:
        assert "is not for vcuda-webhook.vcuda-quota.svc" in found.problems[0].text
        assert found.problems[0].command == "kubectl -n vcuda-quota describe secret vcuda-webhook-tls"


def foreign(name: str, issuer: str, key: ec.EllipticCurvePrivateKey) -> Signed:
    """Return a CA of another tool. If ``name`` is ``issuer``, the CA is self-signed. Otherwise ``key`` signs it."""
    own = ec.generate_private_key(ec.SECP256R1()) if name != issuer else key
    subject, issued_by = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, one)]) for one in (name, issuer))
    begin, end, public = START - timedelta(days=1), START + timedelta(days=900), own.public_key()
    certificate = (
        x509.CertificateBuilder(issued_by, subject, public, x509.random_serial_number(), begin, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Signed(certificate, own)


def test_a_chain_with_an_intermediate_ca_is_unknown_and_no_problem() -> None:
    """Python's ssl module returns only the server's own certificate, so the report cannot see an intermediate CA."""
    world, key = healthy(), ec.generate_private_key(ec.SECP256R1())
    root = foreign("root", "root", key)
    middle = foreign("middle", "root", key)
    of_another_tool(world, root)
    world.serve(make_leaf(middle, NAMES, START).certificate)
    found = report(world)
    assert found.problems == ()
    assert {call.trusted for call in found.calls} == {None}
    assert "cannot tell: an intermediate CA may be between" in certificate_table(found)
    assert {call["trusted"] for call in json.loads(document(found))["calls"]} == {None}


ROOT = foreign("root", "root", ec.generate_private_key(ec.SECP256R1()))
ROOT_AGAIN = foreign("root", "root", ec.generate_private_key(ec.SECP256R1()))
OURS = make_authority(START)
NOT_TRUSTED: dict[str, tuple[x509.Certificate, Certificates]] = {
    "by a CA of ours": (make_leaf(OURS, NAMES, START).certificate, (ROOT.certificate,)),
    "by nobody": (ROOT_AGAIN.certificate, (ROOT.certificate,)),
    "an empty caBundle": (make_leaf(ROOT, NAMES, START).certificate, ()),
    "a caBundle of ours": (make_leaf(ROOT, NAMES, START).certificate, (OURS.certificate,)),
    "a CA of the same name": (make_leaf(ROOT_AGAIN, NAMES, START).certificate, (ROOT.certificate,)),
}


@pytest.mark.parametrize(("leaf", "bundle"), NOT_TRUSTED.values(), ids=NOT_TRUSTED.keys())
def test_a_leaf_without_a_possible_intermediate_ca_is_not_trusted(leaf: x509.Certificate, bundle: Certificates) -> None:
    world = healthy()
    of_another_tool(world, ROOT)
    world.put_hooks(bundle=bundle)
    world.serve(leaf)
    found = report(world)
    assert {call.trusted for call in found.calls} == {False}
    assert found.problems


def test_an_expired_leaf_is_reported_as_expired() -> None:
    world = healthy()
    world.serve(make_leaf(world.current, NAMES, START, timedelta(minutes=1)).certificate)
    world.time += timedelta(hours=1)
    assert "the leaf that is served has expired" in certificate_table(report(world))


def test_a_leaf_with_an_unreadable_subject_is_still_shown() -> None:
    world = healthy()
    leaf = make_leaf(OURS, NAMES, START).certificate.public_bytes(Encoding.DER)
    world.serve(x509.load_der_x509_certificate(leaf.replace(b"quota webhook", b"\xff\xfeota webhook")))
    assert "(an unreadable subject)" in certificate_table(report(world))
