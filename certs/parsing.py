"""Parses Secrets, caBundles and PEM text, which a user may have edited. No message contains a part of a private key."""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from certs import state
from vcuda.tls import OTHER_TOOLS, OURS, WRITTEN_BY
from vcuda.x509 import Signed, parse_ip, service_names

_BLOCK = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_BEGIN = b"-----BEGIN CERTIFICATE-----"
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion)

Json = Mapping[str, Any]

TRUSTED = "quota.vcuda.io/ca-trusted-since"
SERVED = "quota.vcuda.io/ca-served-since"
TLS_TYPE = "kubernetes.io/tls"
CLIENT_CA_KEY = "ca.crt"
"""The ConfigMap for the webhook's flag --client-ca has the CAs of client certificates, in PEM, under this key."""


@dataclass(frozen=True, slots=True)
class ObjectRefs:
    """Names of the webhook's Service and Secrets. ``addresses``: HOST:PORT of webhooks registered with a URL."""

    namespace: str
    service: str
    authority_secret: str
    serving_secret: str
    addresses: frozenset[str] = frozenset()


class UnusablePair(ValueError):
    """Raised if a certificate or its private key is missing or unusable. The message contains no part of the key."""


def read_certificates(text: bytes) -> tuple[state.Certificates, bool]:
    """Return the distinct certificates in a PEM text, and True if it contains only readable certificates."""
    # An unreadable PEM block is skipped, as in the API server, which skips such a block of a caBundle (Go's
    # AppendCertsFromPEM).
    found: dict[x509.Certificate, None] = {}
    whole = not _BLOCK.sub(b"", text).strip()
    for block in _BLOCK.findall(text):
        try:
            certificate = x509.load_pem_x509_certificate(block)
            certificate.public_key()
        except _UNREADABLE:
            whole = False
        else:
            found[certificate] = None
    return tuple(found), whole


def write_certificates(certificates: state.Certificates) -> bytes:
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


def read_authority(certificate: bytes, key: bytes, name: str) -> Signed:
    """Return the first certificate in the PEM, which must be a CA's, with its key. Raises UnusablePair."""
    pair = _read_pair(certificate, key, name)
    if not is_authority(pair.certificate):
        raise UnusablePair(f"{name}.crt is not the certificate of a CA")
    return pair


def is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except state.UNREADABLE_EXTENSIONS:
        return False


def _read_pair(certificate: bytes, key: bytes, name: str) -> Signed:
    # ``name``: the name of both files without extension, for messages. For example ``tls`` for tls.crt and tls.key.
    if not certificate or not key:
        missing = [file for file, text in ((f"{name}.crt", certificate), (f"{name}.key", key)) if not text]
        raise UnusablePair(f"the Secret does not contain {' and '.join(missing)}")
    found, _ = read_certificates(certificate)
    if not found:
        raise UnusablePair(f"{name}.crt contains no certificate")
    private = _read_key(key, name)
    if found[0].public_key() != private.public_key():
        raise UnusablePair(f"{name}.key is not the key of {name}.crt")
    return Signed(found[0], private)


def _readable(text: bytes) -> bool:
    # Return True if every PEM block with the label CERTIFICATE is a readable certificate. Other text is ignored.
    try:
        return bool(x509.load_pem_x509_certificates(text)) and _BEGIN not in _BLOCK.sub(b"", text)
    except _UNREADABLE:
        return False


def _read_key(text: bytes, name: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(text, password=None)
    except _UNREADABLE as error:
        # The message of the library is left out, because it might contain a part of the key.
        raise UnusablePair(f"{name}.key contains no private key") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UnusablePair(f"{name}.key is not an ECDSA key")
    return key


def other_tool(item: Json) -> str:
    annotations = _part(item, "metadata", "annotations")
    return next(
        (tool for prefix, tool in OTHER_TOOLS.items() if any(key.startswith(prefix) for key in annotations)), ""
    )


def is_labelled(item: Json, labels: Mapping[str, str]) -> bool:
    return labels.items() <= _part(item, "metadata", "labels").items()


def secret_problem(secret: Json, refs: ObjectRefs, wanted_type: str | None) -> state.Problem | None:
    """Return why vcuda-certs must not write this Secret; None if it may. ``wanted_type``: None permits any type."""
    name = str(_part(secret, "metadata")["name"])
    target = f"-n {refs.namespace} secret"
    labels = _part(secret, "metadata", "labels")
    if tool := other_tool(secret):
        text = f"Secret {name} is managed by {tool}; choose another Secret with --ca-secret"
        return state.Problem(text, f"kubectl get {target} {name}")
    if secret.get("data") and labels.get(WRITTEN_BY) != OURS:
        text = f"Secret {name} was not created by vcuda-certs; label it to let vcuda-certs write it"
        return state.Problem(text, f"kubectl label {target} {name} {WRITTEN_BY}={OURS} --overwrite")
    if secret.get("immutable"):
        text = f"Secret {name} is immutable, so vcuda-certs cannot write it"
        return state.Problem(text, f"kubectl delete {target} {name}")
    if wanted_type and secret.get("type") != wanted_type:
        text = f"Secret {name} has type {secret.get('type')}, which cannot be changed to {wanted_type}"
        return state.Problem(text, f"kubectl delete {target} {name}")
    return None


def read_authorities(secret: Json) -> state.Authorities:
    data = _data(secret)
    current, fault = _authority(data, "ca")
    next_ca, another = _authority(data, "next")
    listed, whole = read_certificates(data.get("retired.crt", b""))
    # If the current or next CA lacks a usable key, this CA counts as retired, because it cannot sign, but endpoints may
    # still serve leaves (certificates) that it signed.
    orphans = [one for name in ("ca", "next") for one in read_certificates(data.get(f"{name}.crt", b""))[0]]
    signing = {one.certificate for one in (current, next_ca) if one}
    retired = dict.fromkeys(one for one in (*listed, *orphans) if one not in signing and is_authority(one))
    faults = (fault, another if "next.crt" in data else "", "" if whole else "retired.crt has unreadable parts")
    annotations = _part(secret, "metadata", "annotations")
    return state.Authorities(
        version=_version(secret),
        current=current,
        next_ca=next_ca,
        retired=tuple(retired),
        trusted=_seen_since(annotations.get(TRUSTED)),
        served=_seen_since(annotations.get(SERVED)),
        faults=tuple(filter(None, faults)),
    )


def read_serving(secret: Json) -> state.Serving:
    data = _data(secret)
    certificate, authorities = data.get("tls.crt", b""), read_certificates(data.get("ca.crt", b""))[0]
    serving = state.Serving(_version(secret), authorities=tuple(filter(is_authority, authorities)))
    try:
        leaf = _read_pair(certificate, data.get("tls.key", b""), "tls")
    except UnusablePair as error:
        return replace(serving, fault=str(error))
    # If any certificate after the first one is malformed, OpenSSL rejects the file, and so does the webhook.
    if not _readable(certificate):
        return replace(serving, fault="tls.crt contains an unreadable certificate")
    return replace(serving, leaf=leaf, fault="")


def read_configuration(item: Json, kind: str, refs: ObjectRefs) -> tuple[state.Configuration, tuple[str, ...]]:
    """Return the configuration with only the webhooks that call our Service, and messages about the others."""
    metadata = _part(item, "metadata")
    hooks, left = [], []
    for index, webhook in enumerate(item.get("webhooks") or ()):
        if elsewhere := _elsewhere(_part(webhook, "clientConfig"), refs):
            left.append(f"webhook {webhook.get('name')} of {kind.lower()}/{metadata['name']} calls {elsewhere}")
            continue
        bundle, whole = _bundle(_part(webhook, "clientConfig").get("caBundle"))
        server = _server(_part(webhook, "clientConfig"))
        hooks.append(state.Hook(index, str(webhook.get("name")), bundle, not whole, server))
    return state.Configuration(kind, str(metadata["name"]), _version(item), tuple(hooks)), tuple(left)


def read_client_cas(config_map: Json | None, name: str, namespace: str) -> state.Configuration:
    """Return the ConfigMap of client CAs as a Configuration with one caBundle. ``config_map``: None if missing."""
    there = config_map or {}
    text = str(_part(there, "data").get(CLIENT_CA_KEY) or "")
    bundle, whole = read_certificates(text.encode())
    found = state.Configuration("ConfigMap", name, _version(there), (state.Hook(0, CLIENT_CA_KEY, bundle, not whole),))
    if not text or is_labelled(there, {WRITTEN_BY: OURS}):
        return found
    command = f"kubectl label -n {namespace} configmap {name} {WRITTEN_BY}={OURS} --overwrite"
    text = f"{found} was not created by vcuda-certs; label it to let vcuda-certs write it"
    return replace(found, read_only=state.Problem(text, command))


def format_seen_since(seen: state.SeenSince | None) -> str | None:
    return f"{seen.since.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ} {seen.fingerprint}" if seen else None


def _seen_since(text: object) -> state.SeenSince | None:
    since, _, fingerprint = str(text or "").partition(" ")
    try:
        return state.SeenSince(fingerprint, datetime.strptime(since, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC))
    except ValueError:
        return None


def _authority(data: Mapping[str, bytes], name: str) -> tuple[Signed | None, str]:
    try:
        return read_authority(data.get(f"{name}.crt", b""), data.get(f"{name}.key", b""), name), ""
    except UnusablePair as error:
        return None, str(error)


def _elsewhere(client: Json, refs: ObjectRefs) -> str:
    if url := client.get("url"):
        return "" if _address(str(url)) in refs.addresses else str(url)
    service = _part(client, "service")
    called = (service.get("namespace"), service.get("name"))
    return "" if called == (refs.namespace, refs.service) else f"Service {called[0]}/{called[1]}"


def _address(url: str) -> str:
    authority = url.partition("://")[2].partition("/")[0]
    return authority if authority.rpartition(":")[2].isdigit() else f"{authority}:443"


def _server(client: Json) -> str:
    # Return the DNS name or IP address for which the certificate of this webhook must be valid.
    if url := client.get("url"):
        host = _address(str(url)).rpartition(":")[0].strip("[]")
        try:
            return str(parse_ip(host))
        except ValueError:
            return host.lower()
    service = _part(client, "service")
    return service_names(str(service.get("name")), str(service.get("namespace"))).dns[2]


def _bundle(text: object) -> tuple[state.Certificates, bool]:
    if not text:
        return (), True
    try:
        return read_certificates(base64.b64decode(str(text), validate=True))
    except binascii.Error:
        return (), False


def _data(secret: Json) -> dict[str, bytes]:
    # b64decode() cannot fail, because the API server stores only valid base64 in the data of a Secret.
    return {name: base64.b64decode(text or "") for name, text in _part(secret, "data").items()}


def _version(item: Json) -> str:
    return str(_part(item, "metadata").get("resourceVersion", ""))


def _part(item: Json, *path: str) -> Json:
    for name in path:
        item = item.get(name) or {}
    return item
