"""The webhook as a process: its parts on a cluster or alone, and the gunicorn that serves it."""

import functools
import gc
import mmap
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import structlog

from vcuda import kube as k8s
from vcuda.ledger.ledger import STORABLE_SECONDS
from vcuda.placement import patches
from vcuda.quota.model import LEDGER_NAMESPACE, NODE_NAMESPACE, SYSTEM_NAMESPACES
from vcuda.quota.quota_clock import QuotaClock
from vcuda.requests.runtime_devices import GPU_RUNTIME_CLASSES
from vcuda.tls import ServingCertificate, watch
from webhook import admission
from webhook.check import files
from webhook.ledger import cluster_ledgers, namespace_ledger
from webhook.metrics import LedgerMetrics, Metrics, ReflectorCollector
from webhook.review import context, namespaces
from webhook.server import app
from webhook.server.application import ServedApplication
from webhook.server.gunicorn_log import StructuredLogger
from webhook.server.worker import KEEP_ALIVE_SECONDS, WebhookWorker

MAX_CONNECTIONS = 2048
"""Open connections. An API server has some hundreds at most. For one more, an idle connection is closed. Each takes 50
KiB, most of it TLS."""

OTHER_FILES = 512
"""Open files beside the clients' connections. Most are connections to the API server."""


LIST_NAMESPACES_SECONDS = 2.0
"""Seconds for the LIST of the namespaces at an edit of the quota. The API server waits ten seconds for the answer."""


MakeService = Callable[[ServingCertificate], admission.Service]


class Cluster(msgspec.Struct, frozen=True):
    """The cluster of a webhook, and the places of its objects.

    ``callers_known``: only the API server is answered, so the namespace of a review need not be checked. ``end`` prints
    an error and ends the webhook; the worker calls it if Kubernetes is too old.
    ``gpu_runtime_classes`` are the patterns of the runtime classes that give GPUs.
    """

    kubeconfig: Path | None
    place: k8s.QuotaPlace
    system_namespace: str
    hints: patches.Hints
    ledger_namespace: str = LEDGER_NAMESPACE
    node_namespace: str = NODE_NAMESPACE
    callers_known: bool = False
    end: Callable[[str], None] = k8s.end_process
    storable_seconds: float = STORABLE_SECONDS
    gpu_runtime_classes: tuple[str, ...] = GPU_RUNTIME_CLASSES
    scheduler_users: frozenset[str] = context.SCHEDULER_USERS

    def check(self) -> None:
        """Read the credentials before anything is started. Raises BadInput if they cannot be read."""
        k8s.Kube.connect(self.kubeconfig).close()

    def make_service(self, certificate: ServingCertificate) -> admission.Service:
        """Return a service that watches the quota and the nodes, and keeps ledgers in ConfigMaps."""
        check = k8s.VersionCheck(structlog.get_logger().warning, self.end)
        # One connection for each thread of the ledgers, so that no thread waits for another, and two more.
        kube = k8s.Kube.connect(
            self.kubeconfig,
            pool_size=namespace_ledger.KUBE_THREADS + namespace_ledger.LIST_THREADS + 2,
            version_check=check,
            grace=k8s.AuthorizerGrace(),
        )
        own = {self.system_namespace, self.ledger_namespace, self.node_namespace}
        quota = k8s.QuotaInformer(kube, self.place, SYSTEM_NAMESPACES | own)
        nodes = k8s.NodeInformer(kube, self.hints.labels, resources=quota.resources)
        cards = k8s.FreeCardsInformer(kube, self.system_namespace)
        devices = k8s.DeviceInformer(kube)
        claims, templates = k8s.ClaimPolicies(quota, nodes, devices), k8s.TemplateInformer(kube)
        dra = k8s.ServedWatches(kube, {**devices.reflectors(), **templates.reflectors()})
        policy = context.ClusterPolicy(
            quota,
            nodes,
            cards,
            self.hints,
            self.storable_seconds,
            claims,
            templates,
            dra,
            k8s.RuntimeClassInformer(kube),
            self.gpu_runtime_classes,
            self.scheduler_users,
        )
        metrics = _metrics(certificate)
        store = k8s.LedgerStore(
            kube,
            self.ledger_namespace,
            nodes.current,
            claims.resources,
            claim_price=claims.price,
            storable_seconds=self.storable_seconds,
        )
        ledgers = cluster_ledgers.ClusterLedgers(store, LedgerMetrics(metrics.registry))
        metrics.watch("vcuda_quota_config_valid", "0 while the document in the cluster is malformed.", quota.is_valid)
        metrics.registry.register(ReflectorCollector(policy.reflectors))
        policy.start()
        charged = ledgers if self.callers_known else namespaces.ExistingNamespaces(ledgers, kube)
        names = functools.partial(k8s.namespace_names, kube, LIST_NAMESPACES_SECONDS)
        return admission.Service(
            policy.current, charged, metrics, admission.Gate(), structlog.get_logger(), self.place, names
        )


class Standalone(msgspec.Struct, frozen=True):
    """A cluster from files, with ledgers in memory. The quota is enforced in every namespace."""

    cluster: files.OfflineCluster

    def make_service(self, certificate: ServingCertificate) -> admission.Service:
        """Return a service that answers from the files alone."""
        metrics, policy = _metrics(certificate), self.cluster.policy
        metrics.watch("vcuda_quota_config_valid", "1 while the document is in force.", lambda: 1)
        ledgers, clock = self.cluster.ledgers(), QuotaClock()

        def current() -> context.PolicySnapshot:
            return msgspec.structs.replace(policy, quota=clock.now(policy.quota))

        return admission.Service(current, ledgers, metrics, admission.Gate(), structlog.get_logger())


def _metrics(certificate: ServingCertificate) -> Metrics:
    metrics = Metrics()
    metrics.watch(
        "vcuda_serving_certificate_expiry_seconds",
        "When the serving certificate expires, in Unix seconds.",
        lambda: certificate.expiry,
    )
    metrics.count(
        "vcuda_serving_certificate_reload_failures",
        "Bad certificate pairs met since the start; the last good one was kept.",
        lambda: certificate.reload_failures,
    )
    return metrics


class Settings(msgspec.Struct, frozen=True):
    """The address, the certificates and the accepted clients. ``drain``: seconds from failing readiness to the stop."""

    bind: str
    certificate: Path
    drain: float = 5.0
    callers: app.Callers = app.EVERYBODY


class Failure:
    """Lets the worker end the whole server, since gunicorn would replace it. It is made before the worker is forked."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)
        self._server = os.getpid()

    @property
    def happened(self) -> bool:
        return self._shared[0] != 0

    def end(self, message: str) -> NoReturn:
        """Print an error, and end the server at once. It is called in the worker, from any thread."""
        os.write(2, f"Error: {message}\n".encode())
        self._shared[0] = 1
        os.kill(self._server, signal.SIGTERM)
        os._exit(0)  # gunicorn would log any other status as a fault of the worker


class WebhookServer(ServedApplication):
    """One gunicorn with one worker. ``make_service`` runs in the worker, because threads do not survive a fork."""

    def __init__(
        self,
        settings: Settings,
        make_service: Callable[[ServingCertificate], admission.Service],
        announce: Callable[[str], None],
    ) -> None:
        self.settings = settings
        self.certificate = ServingCertificate(settings.certificate, settings.callers.client_ca)
        self.stopping = threading.Event()
        self.drain = settings.drain
        self.service: admission.Service | None = None
        self._make_service = make_service
        self._announce = announce
        super().__init__()

    def load_config(self) -> None:
        """Set gunicorn's options. Its own configuration files and variables are not read."""
        options: dict[str, Any] = {
            "bind": self.settings.bind,
            "workers": 1,
            "worker_class": WebhookWorker,
            "asgi_loop": "uvloop",
            "asgi_lifespan": "off",
            "worker_connections": max_connections(),
            "keepalive": int(KEEP_ALIVE_SECONDS),
            "graceful_timeout": int(self.settings.drain) + 10,
            "forwarded_allow_ips": "",
            "post_worker_init": self._ready,
            "control_socket_disable": True,
            "loglevel": "warning",
            "logger_class": StructuredLogger,
            "proc_name": "vcuda-webhook",
        }
        shared_memory = Path("/dev/shm")  # noqa: S108  # gunicorn's heartbeat file; a read-only root has no other place
        if shared_memory.is_dir():
            options["worker_tmp_dir"] = str(shared_memory)
        for name, value in options.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        """Return the application, in the worker. A later worker is forked from the state of the start."""
        self.certificate.poll()
        threading.Thread(target=watch, args=(self.certificate, self.stopping), name="certificate", daemon=True).start()
        self.service = self._make_service(self.certificate)
        gc.freeze()  # the loaded objects stay, so the garbage collector need not look at them while serving
        return app.Application(self.service, self.settings.callers)

    def _ready(self, worker: WebhookWorker) -> None:
        """Log the address when the worker serves it. gunicorn's own ``when_ready`` runs before there is a worker."""
        if self.service is not None:
            export_connections(self.service.metrics, worker)
            export_waiting(self.service.metrics, self.service)
        host, port = worker.sockets[0].getsockname()[:2]
        self._announce(f"https://{f'[{host}]' if ':' in host else host}:{port}")


def max_connections() -> int:
    """Raise the limit of open files as far as allowed. Return the number of connections that clients may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(hard - OTHER_FILES, 1))


def export_connections(metrics: Metrics, worker: WebhookWorker) -> None:
    """Export the numbers of the worker's clients, and of those that its bounds turned away."""
    metrics.watch("vcuda_connections", "Connections open.", lambda: worker.connections)
    metrics.watch(
        "vcuda_client_certificate_expiry_seconds",
        "When the client certificate that was presented last expires, in Unix seconds; NaN: none was.",
        lambda: worker.client_expiry,
    )
    metrics.count(
        "vcuda_connections_shed", "Connections closed, since the start, to have room for new ones.", lambda: worker.shed
    )
    metrics.count(
        "vcuda_requests_overdue", "Requests, since the start, that did not come in time.", lambda: worker.overdue
    )


def export_waiting(metrics: Metrics, service: admission.Service) -> None:
    metrics.watch(
        "vcuda_large_reviews_waiting",
        "Reviews over 64 KiB, and edits of the quota, that wait for a place to be decided.",
        lambda: service.waiting,
    )
