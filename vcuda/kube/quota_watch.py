"""The quota document as the cluster has it, watched."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from vcuda.errors import Fault, QuotaFault, VcudaError
from vcuda.kube.client import Kube
from vcuda.kube.events import Event, Subject, post_event
from vcuda.kube.paths import segment
from vcuda.kube.reflector import Reflector
from vcuda.objects import ConfigMap
from vcuda.quota import Quota
from vcuda.quota_document import parse_quota

MOST_FAULTS = 20
"""Faults of one document that are logged; an alias can repeat one without end."""


_decode = msgspec.json.Decoder(ConfigMap).decode


class QuotaPlace(msgspec.Struct, frozen=True):
    """Where the quota document is: a key of a ConfigMap."""

    namespace: str = "kube-system"
    name: str = "gpuquota"
    key: str = "gpu_quota"


class QuotaWatch:
    """Follows the quota ConfigMap. A malformed document leaves the last good one in force and is reported.

    A ConfigMap that is deleted limits nobody any more, as a deleted ResourceQuota does. ``on_change`` is called after a
    new quota has come into force.
    """

    def __init__(
        self,
        kube: Kube,
        place: QuotaPlace,
        system: frozenset[str],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._kube = kube
        self._place = place
        self._nobody = Quota(system=system)
        self._log = structlog.get_logger().bind(configmap=f"{place.namespace}/{place.name}")
        self._quota: Quota | None = None
        self._faulty = False
        self._on_change = on_change
        self._path = f"/api/v1/namespaces/{segment(place.namespace)}/configmaps"
        self._params = {"fieldSelector": f"metadata.name={place.name}"}
        self.reflector = Reflector(kube, self._path, _decode, params=self._params, on_event=self._on_event)

    def current(self) -> Quota | None:
        """Return the quota in force, or None until it has been read once. An absent ConfigMap limits nobody.

        Only the watch's own thread sets what is in force: an answer to a request that was about to find none must
        not overwrite a document that has just come.
        """
        if self._quota is None and self.reflector.synced.is_set() and not self._faulty:
            return self._nobody
        return self._quota

    def stored_version(self) -> str:
        """Return the resourceVersion of the document as etcd has it, by a consistent LIST; empty where there is none.

        Raises:
            Unreachable: no answer.

        """
        found = [
            _decode(raw).metadata for page in self._kube.list_pages(self._path, self._params) for raw in page.items
        ]
        return next((metadata.resource_version for metadata in found if metadata.name == self._place.name), "")

    def is_valid(self) -> bool:
        """Return False while the document in the cluster is malformed: not the one in force, if any is."""
        return not self._faulty

    def _on_event(self, _old: ConfigMap | None, new: ConfigMap | None) -> None:
        self._quota = self.current()
        if new is None:
            self._accept(self._nobody)
            self._log.warning("quota ConfigMap deleted: no namespace is limited")
            return
        try:
            quota = self._parse(new)
        except QuotaFault as fault:
            self._reject(new, fault)
        else:
            self._accept(quota)
            self._log.info("quota read", namespaces=len(quota.namespaces), version=new.metadata.resource_version)

    def _parse(self, config_map: ConfigMap) -> Quota:
        key = self._place.key
        if key not in (config_map.data or {}):
            raise QuotaFault((Fault(f"data.{key}", "is missing; the quota document belongs there"),))
        quota = parse_quota((config_map.data or {})[key], self._nobody.system)
        return msgspec.structs.replace(quota, version=config_map.metadata.resource_version)

    def _accept(self, quota: Quota) -> None:
        self._quota, self._faulty = quota, False
        self._on_change()

    def _reject(self, config_map: ConfigMap, fault: QuotaFault) -> None:
        self._faulty = True
        kept = "the last good one stays in force" if self._quota else "no quota has been read yet"
        self._log.error("quota document malformed", faults=[str(f) for f in fault.faults[:MOST_FAULTS]], kept=kept)
        try:
            self._post_event(config_map, f"the quota document is malformed, {kept}: {fault}")
        except VcudaError as error:
            self._log.warning("event not written", error=str(error))

    def _post_event(self, config_map: ConfigMap, message: str) -> None:
        """Write an Event on the ConfigMap, once for all replicas: its name holds the version that it is about."""
        version = config_map.metadata.resource_version
        place = self._place
        subject = Subject("v1", "ConfigMap", place.name, place.namespace, config_map.metadata.uid, version)
        post_event(
            self._kube, Event(subject, f"malformed-{version}", "MalformedQuota", message, "vcuda-quota", type="Warning")
        )
