"""Publishes the usage of each namespace in its ConfigMap ``gpu-quota-usage``, which its users can read."""

import hashlib
import threading
import time
from collections.abc import Callable, Mapping

import msgspec
import structlog

from controller.recount.team_usages import TeamUsages, team_in, team_key
from controller.workqueue import Reconciler
from vcuda import errors, k8s_types
from vcuda.k8s_types import Decoder
from vcuda.kube import NOT_TRACKED, Kube, Reflector, events, segment, upsert
from vcuda.ledger.report import NamespaceUse
from vcuda.quota.well_known import USAGE_KEY, USAGE_LABELS, USAGE_NAME

UNHURRIED_SECONDS = 5.0
"""Minimum seconds between two reports of a namespace with free quota. No pod waits for these reports."""

NAMESPACE_TERMINATING = "NamespaceTerminating"
"""The cause in a 403 answer: the object's namespace is being deleted (``corev1.NamespaceTerminatingCause``)."""

REASON = "ChargedNotCreated"

_CONFIG_MAP = Decoder(k8s_types.ConfigMap)


class Published(msgspec.Struct, frozen=True):
    """The stored usage report of a namespace, without its text."""

    namespace: str
    hash: bytes
    """The hash of the report's text. The text is not kept, because a tenant may have made it large."""


class Publisher:
    """Keeps the last usage report of every limited namespace, and publishes the report.

    The published ConfigMaps are watched. If a user changes or deletes a report, the report is written again. A report
    of an earlier leader is deleted if the namespace is no longer limited.
    """

    def __init__(
        self, kube: Kube, clock: Callable[[], float] = time.monotonic, *, teams: TeamUsages | None = None
    ) -> None:
        self._teams = teams or TeamUsages()
        self.reconciler = Reconciler("publish", self._reconcile, failure="usage not published", clock=clock)
        self.published = Reflector(
            kube,
            "/api/v1/configmaps",
            _read_published,
            params={"fieldSelector": f"metadata.name={USAGE_NAME}"},
            # If a user edits or deletes a usage report, `_on_event` queues its namespace, to restore the report.
            on_event=self._on_event,
        )
        self._kube = kube
        self._lock = threading.Lock()
        self._reports: dict[str, NamespaceUse | None] = {}
        # `_warned`: by namespace, the identity of the last Event about pods that are charged but not created.
        self._warned: dict[str, str] = {}
        # `_written`: by namespace, the hash of the last written report, so that `_on_event` can ignore our own writes.
        self._written: dict[str, bytes] = {}
        self._log = structlog.get_logger()

    def report(self, namespace: str, use: NamespaceUse | None) -> None:
        """Queue a usage report for publication. If ``use`` is None, queue the deletion of the namespace's ConfigMap."""
        with self._lock:
            changed = namespace not in self._reports or self._reports[namespace] != use
            before = self._reports.get(namespace)
            self._reports[namespace] = use
        if changed:
            unhurried = before and use and use.has_room and limits_of(before) == limits_of(use)
            self.reconciler.queue.add(namespace, interval=UNHURRIED_SECONDS if unhurried else None)
            if use and use.team:
                # The figures of the team are in the reports of all its namespaces. These writes are about one a second.
                members = self._teams.count(use.team.name)
                self.reconciler.queue.add(team_key(use.team.name), interval=max(UNHURRIED_SECONDS, members))

    def reports(self) -> Mapping[str, NamespaceUse]:
        with self._lock:
            return {namespace: self._newest(use) for namespace, use in self._reports.items() if use}

    def _newest(self, use: NamespaceUse) -> NamespaceUse:
        return use.within(self._teams.current(use.team)) if use.team else use

    def published_in(self) -> set[str]:
        return {key.namespace for key in self.published.snapshot()}

    def _reconcile(self, key: str) -> None:
        if (team := team_in(key)) is None:
            self._publish(key)
            return
        for namespace in self._teams.members(team):
            self.reconciler.queue.add(namespace)

    def _publish(self, namespace: str) -> None:
        with self._lock:
            if namespace not in self._reports:
                return  # An earlier leader wrote the stored usage report. This leader has no report to publish yet.
            report = self._reports[namespace]
            use = self._newest(report) if report else None
        published = self.published.get((namespace, USAGE_NAME))
        if use is None:
            if published:
                self._delete_report(namespace)
            with self._lock:
                if self._reports.get(namespace) is None:
                    self._reports.pop(namespace, None)
                    self._written.pop(namespace, None)
                    self._warned.pop(namespace, None)
            return
        self._warn_of_unstored(use)
        text = msgspec.json.format(msgspec.json.encode(use.shortened()), indent=2).decode()
        written = _hash(text)
        # Compare the report with the last write, too, because the watch may not have delivered that write yet.
        if published and published.hash == written and self._written.get(namespace, written) == written:
            return
        self._written[namespace] = written
        metadata = {"name": USAGE_NAME, "namespace": namespace, "labels": USAGE_LABELS, "managedFields": NOT_TRACKED}
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {USAGE_KEY: text}}
        try:
            upsert(self._kube, _collection(namespace), config_map)
        except errors.ApiError as error:
            # Do not retry while the namespace is being deleted. If it is created again, an event queues its report.
            if not is_without_home(error):
                raise
            self._log.debug("usage not published, because the namespace is deleted or terminating", namespace=namespace)

    def _warn_of_unstored(self, use: NamespaceUse) -> None:
        """Write an Event if pods are charged but not created, at most one per namespace and hour."""
        id_ = f"unstored-{k8s_types.time_now()[:13].lower()}"
        if use.unstored_warning and self._warned.get(use.namespace) != id_:
            self._warned[use.namespace] = id_
            subject = events.InvolvedObject("v1", "ConfigMap", USAGE_NAME, use.namespace)
            event = events.Event(subject, id_, REASON, use.unstored_warning, "vcuda-controller", type="Warning")
            events.post_event_or_log(self._kube, event)

    def _delete_report(self, namespace: str) -> None:
        try:
            self._kube.delete(f"{_collection(namespace)}/{USAGE_NAME}")
        except errors.NotFound:
            return
        self._log.info("usage report deleted, because the namespace is no longer limited", namespace=namespace)

    def _on_event(self, old: Published | None, new: Published | None) -> None:
        published = new or old
        if published and not (new and self._written.get(new.namespace) == new.hash):
            self.reconciler.queue.add(published.namespace)


def _collection(namespace: str) -> str:
    return f"/api/v1/namespaces/{segment(namespace)}/configmaps"


def limits_of(use: NamespaceUse) -> object:
    """Return the parts of a namespace's report whose changes are published immediately: mode, limits and state."""
    limits = [(model.model, model.limit, model.memory_limit, model.grants) for model in use.limits]
    of_team = [(each.model, each.limit, each.memory_limit) for each in use.team.limits] if use.team else []
    return use.mode, use.taking_effect, use.unregistered, use.ledger_lost, use.unpinned, limits, of_team


def is_without_home(error: errors.ApiError) -> bool:
    """Return True if an object could not be created because its namespace does not exist or is being deleted.

    For a namespace that is being deleted, the API server answers 403 with the cause `NAMESPACE_TERMINATING`.
    """
    return error.has_cause(NAMESPACE_TERMINATING) or isinstance(error, errors.NotFound)


def _read_published(raw: bytes) -> Published | None:
    config_map = _CONFIG_MAP.decode(raw)
    # A ConfigMap without vcuda's labels was made by somebody else, and must stay even if the namespace is not limited.
    if not USAGE_LABELS.items() <= (config_map.metadata.labels or {}).items():
        return None
    return Published(config_map.metadata.namespace, _hash((config_map.data or {}).get(USAGE_KEY, "")))


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
