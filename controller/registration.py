"""Checks that the API server has the webhooks and policies that the manifests declare, and applies them.

If an object is missing, pods beyond the quota are admitted, and no failed request shows it.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec
import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcuda import errors
from vcuda.kube import Kube, objects
from vcuda.registration import CALLED, DECLARED, PROBE, VALIDATING, MissingObject, summarize_missing

INTERVAL_SECONDS = 60.0
INCOMPLETE_SECONDS = 5.0
"""Seconds between two checks while an object is missing, to report soon that a new installation is complete."""
# The API server applies a new policy or label after a short delay. So one attempt does not prove that it is ignored.
ATTEMPTS, PAUSE_SECONDS = 10, 1.0

NO_POLICIES = MissingObject(
    "AdmissionPlugin",
    "ValidatingAdmissionPolicy",
    "is disabled: the API server does not evaluate policy in-effect.quota.vcuda.io",
)
NO_WEBHOOKS = MissingObject(
    "AdmissionPlugin",
    "ValidatingAdmissionWebhook",
    "is disabled: the API server does not call webhook config.quota.vcuda.io",
)
NO_TRUST = MissingObject(
    VALIDATING, "vcuda-quota", "has a caBundle by which the API server does not trust the webhook's certificate"
)
EXPIRED = MissingObject(VALIDATING, "vcuda-quota", "cannot be called, because the webhook's certificate has expired")
HAS_EXPIRED = "certificate has expired"
"""The API server's answer contains this text if the webhook's certificate has expired."""
UNTRUSTED = "x509:"
"""The API server's answer contains this text if it does not trust the certificate of a webhook that it calls."""
PLUGINS = tuple((each.kind, each.name) for each in (NO_POLICIES, NO_WEBHOOKS))

# No policy applies to this probe, as it is in kube-system. Its label makes the API server call config.quota.vcuda.io.
_PROBED = "kube-system"
_METADATA = {"name": PROBE, "namespace": _PROBED, "labels": {"quota.vcuda.io/config": "true"}}
_BODY = msgspec.json.encode({"apiVersion": "v1", "kind": "ConfigMap", "metadata": _METADATA})


class RegistrationWatch(Collector):
    """Keeps what the last check found to be missing, and collects it as a metric.

    ``is_evaluated``: returns False if the API server does not reject the probe of a limited namespace.
    ``on_change``: called when a check finds something else than the check before.
    """

    def __init__(self, kube: Kube, is_evaluated: Callable[[], bool], on_change: Callable[[], None]) -> None:
        self._kube = kube
        self._is_evaluated = is_evaluated
        self._on_change = on_change
        self._missing: Sequence[MissingObject] | None = None
        self._log = structlog.get_logger()

    @property
    def text(self) -> str:
        """One text about everything that is missing; empty if nothing is missing or before the first check."""
        return summarize_missing(self._missing or ())

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "vcuda_registration_missing",
            "1 if the API server lacks this webhook configuration, policy or binding, or has a changed one; else 0.",
            labels=["kind", "name"],
        )
        if self._missing is not None:
            missing = {(each.kind, each.name) for each in self._missing}
            for each in (*DECLARED, *PLUGINS):
                family.add_metric(each, each in missing)
        return [family]

    def run(self, stop: threading.Event) -> None:
        while True:
            try:
                self.check(stop.wait)
            except Exception as error:  # noqa: BLE001  # a user may have edited the objects, which are read unchecked
                self._log.warning("the registration could not be checked", reason=repr(error))
            if stop.wait(INTERVAL_SECONDS if self._missing == [] else INCOMPLETE_SECONDS):
                return

    def check(self, wait: Callable[[float], object]) -> None:
        """Read every declared object. Raises VcudaError if the API server does not answer."""
        missing, failure = inspect(self._kube, self._is_evaluated, wait, self._missing or ())
        self._keep(missing)
        if failure:
            raise failure

    def _keep(self, missing: Sequence[MissingObject]) -> None:
        if missing == (self._missing or []):
            self._missing = missing
            return
        self._missing = missing
        if missing:
            self._log.warning("quotas are not in effect", missing=self.text)
        else:
            self._log.info("the registration is complete again")
        self._on_change()


def inspect(
    kube: Kube, is_evaluated: Callable[[], bool], wait: Callable[[float], object], known: Sequence[MissingObject] = ()
) -> tuple[Sequence[MissingObject], errors.VcudaError | None]:
    """Return what is missing, and the error of a probe that failed. Raises VcudaError if no object can be read.

    Each admission plugin has its own probe. If the probe of a plugin in ``known`` fails, the plugin stays missing.
    """
    missing, failure = objects.missing_registration(kube), None
    for each, probe in ((NO_POLICIES, is_evaluated), (NO_WEBHOOKS, lambda: _is_called(kube))) if not missing else ():
        try:
            lacks = not any(probe() or wait(PAUSE_SECONDS) for _ in range(ATTEMPTS))
        except errors.VcudaError as error:
            lacks, failure = each in known, error
            if UNTRUSTED in str(error):
                missing, failure = [*missing, EXPIRED if HAS_EXPIRED in str(error) else NO_TRUST], None
        if lacks:
            missing = [*missing, each]
    return missing, failure


def _is_called(kube: Kube) -> bool:
    """Return False if the API server admits the probe without a call of the webhook. A failed call counts as a call."""
    try:
        kube.post(f"/api/v1/namespaces/{_PROBED}/configmaps", _BODY, {"dryRun": "All"})
    except errors.Conflict:  # the ConfigMap exists, which is reported after all webhooks have admitted the probe
        return False
    except errors.ApiError as error:
        if CALLED not in error.message:
            raise
        return True
    return False
