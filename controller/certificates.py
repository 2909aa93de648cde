"""Checks that the webhook's serving certificate is renewed in time. `vcuda-certs` renews the certificate.

The controller lists the endpoints of the webhook's Service every few seconds. Every few minutes it connects to each
endpoint and reads the certificate that the endpoint presents. So the controller needs no access to Secrets, and reads
the certificate that the API server gets.
"""

import datetime
import threading
from collections.abc import Iterable, Sequence

import msgspec
import structlog
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509 import Certificate
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcuda import errors, k8s_types, tls
from vcuda.k8s_types import Decoder
from vcuda.kube import Event, InvolvedObject, Kube, post_event, segment
from vcuda.kube.endpoints import service_addresses
from vcuda.x509 import renewal_due

LOOK_SECONDS = 5.0  # Seconds between two LISTs of the webhook's endpoints.
INTERVAL = datetime.timedelta(minutes=5)  # The time between two reads of one endpoint's certificate.
PORT_NAME = "https"
REASON = "CertificateNotRenewed"


class ServedCertificate(msgspec.Struct, frozen=True):
    """The certificate of one endpoint of the webhook. ``fault``: why it could not be read; empty if it was read."""

    address: str
    fingerprint: str = ""
    start: datetime.datetime | None = None
    end: datetime.datetime | None = None
    fault: str = ""


class CertificateWatch(Collector):
    """Reads the certificates of a Service's endpoints every five minutes, and collects the metric of their expiry."""

    def __init__(self, kube: Kube, namespace: str, service: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._service = service
        self._shown: Sequence[ServedCertificate] | None = None
        self._read: dict[str, tuple[datetime.datetime, ServedCertificate]] = {}
        self._fault = ""
        self._log = structlog.get_logger().bind(service=f"{namespace}/{service}")

    def shown(self) -> Sequence[ServedCertificate] | None:
        """Return the certificate that each ready endpoint presented last; None before the first check."""
        return self._shown

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "vcuda_webhook_certificate_expiry_seconds",
            "Expiry of the certificate that this endpoint of the webhook presents, in Unix seconds.",
            labels=["endpoint"],
        )
        for one in self._shown or ():
            if one.end:
                family.add_metric([one.address], one.end.timestamp())
        return [family]

    def run(self, stop: threading.Event) -> None:
        while True:
            self._look_safely()
            if stop.wait(LOOK_SECONDS):
                return

    def check(self, now: datetime.datetime) -> None:
        """Read the certificates of new endpoints, and of those that were not read for `INTERVAL`.

        Write an Event about each of these certificates whose renewal is overdue. The Event refers to the webhook's
        Service. Raises VcudaError if a request to the API server fails.
        """
        endpoints = service_addresses(self._kube, self._namespace, self._service, PORT_NAME)
        addresses = [address for address, ready in endpoints.items() if ready]
        known = {address: self._read[address] for address in addresses if address in self._read}
        recent = {address: each for address, each in known.items() if not each[1].fault and now - each[0] < INTERVAL}
        due = [address for address in addresses if address not in recent]
        leaves = tls.served_leaves(due, f"{self._service}.{self._namespace}.svc")
        fresh = [_certificate_of(address, *served) for address, served in zip(due, leaves, strict=True)]
        self._read = recent | {one.address: (now, one) for one in fresh}
        self._shown = tuple(self._read[address][1] for address in addresses)
        for late in {one.fingerprint: one for one in fresh if is_late(one, now)}.values():
            self._report(late, now)

    def _look_safely(self) -> None:
        # If checks fail again and again for the same reason, for example because no webhook is installed, the reason is
        # logged only once.
        try:
            self.check(datetime.datetime.now(datetime.UTC))
            fault = "" if self._shown else "no endpoint of the Service is ready"
        except (errors.VcudaError, *k8s_types.UNDECODABLE) as error:
            fault = str(error)
        if fault and fault != self._fault:
            self._log.warning("the webhook's certificate could not be checked", reason=fault)
        self._fault = fault

    def _report(self, late: ServedCertificate, now: datetime.datetime) -> None:
        message = message_for(late, now, self._namespace)
        self._log.warning("the webhook's certificate was not renewed", endpoint=late.address, end=str(late.end))
        path = f"/api/v1/namespaces/{segment(self._namespace)}/services/{segment(self._service)}"
        service = Decoder(k8s_types.K8sObject).decode(self._kube.get(path))
        subject = InvolvedObject("v1", "Service", self._service, self._namespace, service.metadata.uid)
        # The name of the Event is made of the certificate's fingerprint and the day. So a new leader does not write a
        # second Event about the same certificate on the same day.
        name = f"certificate-{late.fingerprint[:8]}-{now:%Y%m%d}"
        post_event(self._kube, Event(subject, name, REASON, message, "vcuda-controller", type="Warning"))


def _certificate_of(address: str, leaf: Certificate | None, fault: str) -> ServedCertificate:
    if leaf is None:
        return ServedCertificate(address, fault=fault)
    return ServedCertificate(
        address, leaf.fingerprint(SHA256()).hex(), leaf.not_valid_before_utc, leaf.not_valid_after_utc
    )


def is_late(one: ServedCertificate, now: datetime.datetime) -> bool:
    """Return True if a certificate was not renewed in time."""
    if one.start is None or one.end is None:
        return False
    # Renewal is overdue if it is late by a thirtieth of the certificate's lifetime, or by 36 hours if that is less. The
    # CronJob that renews certificates runs several times in this period.
    return now > renewal_due(one.start, one.end) + min((one.end - one.start) / 30, datetime.timedelta(hours=36))


def message_for(late: ServedCertificate, now: datetime.datetime, namespace: str) -> str:
    ended = late.end is not None and late.end <= now
    what, when = f"the webhook's certificate at {late.address}", f"{late.end:%Y-%m-%d %H:%M} UTC"
    state = f"{what} was not renewed and expires at {when}"
    if ended:
        state = f"{what} was not renewed and expired at {when}, so calls to the webhook fail"
    return (
        f"{state}. `vcuda-certs status` shows the reason. To renew the certificate now, run:"
        f" kubectl -n {namespace} create job --from=cronjob/vcuda-certs vcuda-certs-now"
    )
