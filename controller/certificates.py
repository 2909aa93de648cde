"""Watches the certificate that the webhook serves, from outside: who renews it is another program, with its own rights.

The endpoints of the webhook's Service are dialled every few minutes, and what they show is read, not trusted. So the
controller needs no right to any Secret, and sees what the API server sees.
"""

import datetime
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import structlog
from cryptography.hazmat.primitives.hashes import SHA256
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcuda import errors, k8s_types, tls
from vcuda.kube import Event, InvolvedObject, Kube, objects, post_event, segment

INTERVAL_SECONDS = 300.0  # between two looks
MAX_DIALS_AT_ONCE = 8
PORT_NAME = "https"
REASON = "CertificateNotRenewed"


class ServedCertificate(msgspec.Struct, frozen=True):
    """What one endpoint (HOST:PORT) shows: a leaf by its fingerprint and its times, or ``fault`` says why none."""

    address: str
    fingerprint: str = ""
    start: datetime.datetime | None = None
    end: datetime.datetime | None = None
    fault: str = ""


class CertificateWatch(Collector):
    """Looks at the endpoints of ``service`` in ``namespace`` until it is stopped; also a collector of its metric."""

    def __init__(self, kube: Kube, namespace: str, service: str) -> None:
        self._kube = kube
        self._namespace = namespace
        self._service = service
        self._shown: Sequence[ServedCertificate] | None = None
        self._fault = ""
        self._log = structlog.get_logger().bind(service=f"{namespace}/{service}")

    def shown(self) -> Sequence[ServedCertificate] | None:
        """Return what each ready endpoint showed at the last look; None before there was one."""
        return self._shown

    def collect(self) -> Iterable[Metric]:
        """Yield the ends of the leaves that were read."""
        family = GaugeMetricFamily(
            "vcuda_webhook_certificate_expiry_seconds",
            "When the certificate that this endpoint of the webhook shows expires, in Unix seconds.",
            labels=["endpoint"],
        )
        for one in self._shown or ():
            if one.end:
                family.add_metric([one.address], one.end.timestamp())
        return [family]

    def run(self, stop: threading.Event) -> None:
        """Look at once, and then every five minutes, until ``stop`` is set."""
        while True:
            self._look_safely()
            if stop.wait(INTERVAL_SECONDS):
                return

    def check(self, now: datetime.datetime) -> None:
        """Dial every ready endpoint, and write an Event on the Service for each leaf that should have been renewed.

        Raises VcudaError.
        """
        endpoints = objects.service_addresses(self._kube, self._namespace, self._service, PORT_NAME)
        addresses = [address for address, ready in endpoints.items() if ready]
        # Some at once, as one that does not answer holds up the others for its whole timeout.
        with ThreadPoolExecutor(MAX_DIALS_AT_ONCE) as pool:
            name = f"{self._service}.{self._namespace}.svc"
            self._shown = tuple(pool.map(lambda address: dial(address, name), addresses))
        for late in {one.fingerprint: one for one in self._shown if is_late(one, now)}.values():
            self._tell(late, now)

    def _look_safely(self) -> None:
        # A fault that lasts is logged once, and not every five minutes: it is as long as the webhook is not installed.
        try:
            self.check(datetime.datetime.now(datetime.UTC))
            fault = "" if self._shown else "no endpoint of the Service is ready"
        except (errors.VcudaError, *k8s_types.UNDECODABLE) as error:
            fault = str(error)
        if fault and fault != self._fault:
            self._log.warning("the webhook's certificate was not looked at", reason=fault)
        self._fault = fault

    def _tell(self, late: ServedCertificate, now: datetime.datetime) -> None:
        message = message_for(late, now, self._namespace)
        self._log.warning("the webhook's certificate was not renewed", endpoint=late.address, end=str(late.end))
        path = f"/api/v1/namespaces/{segment(self._namespace)}/services/{segment(self._service)}"
        service = msgspec.json.decode(self._kube.get(path), type=k8s_types.K8sObject)
        subject = InvolvedObject("v1", "Service", self._service, self._namespace, service.metadata.uid)
        # Of one name a day and leaf, so that it is one Event whoever leads.
        name = f"certificate-{late.fingerprint[:8]}-{now:%Y%m%d}"
        post_event(self._kube, Event(subject, name, REASON, message, "vcuda-controller", type="Warning"))


def dial(address: str, server_name: str) -> ServedCertificate:
    """Return what HOST:PORT shows a client that asks for ``server_name``; nothing is sent to it."""
    try:
        leaf = tls.served_leaf(address, server_name)
    except errors.Unavailable as error:
        return ServedCertificate(address, fault=str(error))
    return ServedCertificate(
        address, leaf.fingerprint(SHA256()).hex(), leaf.not_valid_before_utc, leaf.not_valid_after_utc
    )


def is_late(one: ServedCertificate, now: datetime.datetime) -> bool:
    """Return whether a leaf should have been renewed: under a third of its life is left, and there was time for it."""
    if one.start is None or one.end is None:
        return False
    life = one.end - one.start
    # That time is a thirtieth of the life, three runs of a daily rotation at 90 days, and at most a day and a half.
    return one.end - now < life / 3 - min(life / 30, datetime.timedelta(hours=36))


def message_for(late: ServedCertificate, now: datetime.datetime, namespace: str) -> str:
    """Return what the Event says."""
    ended = late.end is not None and late.end <= now
    state = "has expired, and calls of the webhook fail" if ended else "has less than a third of its life left"
    return (
        f"the certificate that the webhook shows at {late.address} {state} (its end: {late.end:%Y-%m-%d %H:%M} UTC),"
        f" and no rotation has renewed it; see `vcuda-certs status`, and run: kubectl -n {namespace} create job"
        " --from=cronjob/vcuda-certs vcuda-certs-now"
    )
