"""Builds the service of the webhook on a cluster, and the gunicorn server that runs the service."""

import functools
import gc
import logging
import mmap
import os
import resource
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import structlog
from gunicorn.app.base import BaseApplication
from gunicorn.config import Config
from gunicorn.glogging import Logger

from vcuda import cli, kube as k8s
from vcuda.placement import patches
from vcuda.placement.affinity import NodeLabels
from vcuda.quota.well_known import SYSTEM_NAMESPACES
from vcuda.requests.runtime_devices import RuntimeClasses
from vcuda.tls import ServingCertificate, watch
from webhook import admission
from webhook.ledger import ledgers, shared
from webhook.metrics import LedgerMetrics, Metrics, ReflectorCollector
from webhook.review import context, namespaces
from webhook.server import app
from webhook.server.worker import KEEP_ALIVE_SECONDS, WebhookWorker

MAX_CONNECTIONS = 2048
"""The maximum number of open client connections. An API server opens some hundreds at most. At the maximum, the server
closes an older connection for each new connection. A connection takes 50 KiB of memory, mostly for TLS."""

OTHER_FILES = 512
"""The number of file descriptors that are kept free of client connections, mainly for calls to the API server."""

LIST_NAMESPACES_SECONDS = 2.0
"""Timeout in seconds of the LIST of all namespaces that an edit of the quota causes. The timeout is short, because the
API server waits only five seconds for the answer to the edit."""

MakeService = Callable[[ServingCertificate], admission.Service]


class ServeOptions(cli.ClusterOptions, frozen=True, kw_only=True):
    """The values of the options of `vcuda-webhook serve`, which docs/reference.md explains."""

    bind: tuple[str, int]
    cert_dir: Path | None
    client_ca: Path | None
    client_name: str | None
    protect_metrics: bool
    scheduler_name: str | None
    scheme_schedulers: Mapping[str, str]
    gpu_runtime_classes: tuple[str, ...]
    scheduler_users: frozenset[str]
    drain_seconds: float
    standalone: bool
    quota: Path | None
    nodes: Path | None

    @property
    def pin_settings(self) -> patches.PinSettings:
        """The node labels that name GPU models and node pools, and the schedulers for pods with GPUs."""
        labels = NodeLabels(self.model_label, self.pool_label)
        return patches.PinSettings(labels, self.scheduler_name, self.scheme_schedulers)


def cluster_service(
    options: ServeOptions, end: Callable[[str], None], certificate: ServingCertificate
) -> admission.Service:
    """Start all watches of the cluster, and return a service whose ledgers are stored in ConfigMaps.

    ``end``: prints an error and ends the webhook. It is called if Kubernetes is too old.
    """
    pin_settings = options.pin_settings
    check = k8s.VersionCheck(structlog.get_logger().warning, end)
    # Each thread for ledgers and LISTs has a separate connection, so that it never waits for another thread. All
    # other threads share two connections.
    kube = k8s.Kube.connect(
        options.kubeconfig,
        pool_size=shared.KUBE_THREADS + shared.LIST_THREADS + 2,
        version_check=check,
        grace=k8s.AuthorizerGrace(),
    )
    own = {options.system_namespace, options.ledger_namespace, options.node_namespace}
    source = k8s.QuotaSource(*options.quota_configmap, options.quota_key)
    callers_known = options.client_ca is not None
    quota = k8s.QuotaInformer(kube, source, SYSTEM_NAMESPACES | own)
    nodes = k8s.NodeInformer(kube, pin_settings.labels, resources=quota.resources)
    devices = k8s.DeviceInformer(kube)
    claims, dra = k8s.ClaimPolicies(quota, nodes, devices), k8s.ServedWatches(kube, devices.reflectors())
    runtime_classes = k8s.RuntimeClassInformer(kube)
    policy = context.ClusterPolicy(
        quota=quota,
        nodes=nodes,
        pin_settings=pin_settings,
        storable_seconds=options.storable_seconds,
        claims=claims,
        dra=dra,
        runtime_classes=runtime_classes,
        gpu_runtime_classes=RuntimeClasses(options.gpu_runtime_classes, runtime_classes.handler_of),
        scheduler_users=options.scheduler_users,
        max_terminating=options.max_terminating_seconds,
    )
    metrics = make_metrics(certificate)
    store = k8s.LedgerStore(
        kube,
        options.ledger_namespace,
        nodes.current,
        claims.resources,
        claim_price=claims.price,
        storable_seconds=options.storable_seconds,
    )
    check_namespace = None if callers_known else namespaces.ExistingNamespaces(kube).check
    charged = ledgers.ClusterLedgers(
        store, LedgerMetrics(metrics.registry), check_namespace=check_namespace, team_map=policy.team_map
    )
    metrics.watch("vcuda_quota_config_valid", "0 while the quota ConfigMap is malformed.", quota.is_valid)
    metrics.registry.register(ReflectorCollector(policy.reflectors))
    policy.start()
    return admission.Service(
        policy.current,
        charged,
        metrics,
        admission.Gate(),
        structlog.get_logger(),
        source=source,
        namespaces=functools.partial(k8s.namespace_names, kube, LIST_NAMESPACES_SECONDS),
        callers_known=callers_known,
        pods=functools.partial(k8s.living_pods, kube),
        quota_valid=quota.is_valid,
    )


def make_metrics(certificate: ServingCertificate) -> Metrics:
    metrics = Metrics()
    metrics.watch(
        "vcuda_serving_certificate_expiry_seconds",
        "When the serving certificate expires, in Unix seconds.",
        lambda: certificate.expiry,
    )
    metrics.count(
        "vcuda_serving_certificate_reload_failures",
        "Failed reloads of the serving certificate since the start. The webhook keeps the last good certificate.",
        lambda: certificate.reload_failures,
    )
    return metrics


class Settings(msgspec.Struct, frozen=True):
    """The settings of the server that do not depend on a cluster."""

    bind: tuple[str, int]
    certificate: Path
    """The directory of tls.crt and tls.key."""
    drain: float = 5.0
    """When the server stops, it accepts connections for this many seconds after its readiness check begins to fail."""
    callers: app.Callers = app.EVERYBODY


class Failure:
    """Ends the whole server from its worker process. If only the worker ended, gunicorn would start another worker.

    The caller must create this object before gunicorn forks the worker. Then both processes share a byte of memory,
    which records the failure.
    """

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)
        self._server = os.getpid()

    @property
    def happened(self) -> bool:
        return self._shared[0] != 0

    def end(self, message: str) -> NoReturn:
        """Print an error, and immediately end the server and this worker. Any thread of the worker may call this."""
        os.write(2, f"Error: {message}\n".encode())
        self._shared[0] = 1
        os.kill(self._server, signal.SIGTERM)
        os._exit(0)  # gunicorn would log any other exit status as a fault of the worker


class StructuredLogger(Logger):
    """Writes the log lines of gunicorn as JSON objects, like all other log lines of the webhook."""

    def setup(self, cfg: Config) -> None:
        """Replace gunicorn's handlers, which would write plain text to standard error."""
        self.error_log.setLevel(cfg.loglevel.upper())
        self.error_log.handlers = [_ToStructlog()]
        self.access_log.handlers = []


class _ToStructlog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger()
        log.log(record.levelno, "gunicorn", message=record.getMessage(), exc_info=record.exc_info or False)


class WebhookServer(BaseApplication):
    """A gunicorn server with one worker process.

    ``make_service``: a function that makes the service. It is called in the worker process, because the service starts
    threads, which would not survive a fork.
    ``announce``: a function that is called with the URL of the server when the worker accepts connections.
    """

    def __init__(self, settings: Settings, make_service: MakeService, announce: Callable[[str], None]) -> None:
        self.settings = settings
        self.certificate = ServingCertificate(settings.certificate, settings.callers.client_ca)
        self.stopping = threading.Event()
        self.drain = settings.drain
        self.service: admission.Service | None = None
        self._make_service = make_service
        self._announce = announce
        super().__init__()

    def load_config(self) -> None:
        """Set gunicorn's options. gunicorn's own configuration files and environment variables are not read."""
        options: dict[str, Any] = {
            "bind": cli.format_address(self.settings.bind),
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
        shared_memory = Path("/dev/shm")  # noqa: S108  # gunicorn's heartbeat file needs a writable file system
        if shared_memory.is_dir():
            options["worker_tmp_dir"] = str(shared_memory)
        for name, value in options.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        """Return the ASGI application. gunicorn calls this method in each new worker."""
        # The certificate files may have changed since the server process read them. So read them again.
        self.certificate.poll()
        threading.Thread(target=watch, args=(self.certificate, self.stopping), name="certificate", daemon=True).start()
        self.service = self._make_service(self.certificate)
        gc.freeze()  # the present objects are never freed, so the garbage collector need not scan them
        return app.Application(self.service, self.settings.callers)

    def _ready(self, worker: WebhookWorker) -> None:
        """Announce the URL when the worker accepts connections. gunicorn's hook ``when_ready`` runs too early."""
        if self.service is not None:
            export_load(self.service, worker)
        self._announce(f"https://{cli.format_address(worker.sockets[0].getsockname()[:2])}")


def max_connections() -> int:
    """Raise the limit of open files to the hard limit, and return the number of connections that clients may open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(hard - OTHER_FILES, 1))


def export_load(service: admission.Service, worker: WebhookWorker) -> None:
    metrics = service.metrics
    metrics.watch("vcuda_connections", "Open connections of clients.", lambda: worker.connections)
    metrics.watch(
        "vcuda_client_certificate_expiry_seconds",
        "Unix time at which the last presented client certificate expires; NaN if no client presented any.",
        lambda: worker.client_expiry,
    )
    metrics.count(
        "vcuda_connections_shed",
        "Connections that the server has closed since the start to make room for new connections.",
        lambda: worker.shed,
    )
    metrics.count(
        "vcuda_requests_overdue",
        "Requests since the start that did not arrive completely in time.",
        lambda: worker.overdue,
    )
    metrics.watch(
        "vcuda_large_reviews_waiting",
        "Reviews over 64 KiB, reviews that take many steps, and edits of the quota that wait in a queue to be decided.",
        lambda: service.large_reviews.waiting + service.quota_edits.waiting,
    )
