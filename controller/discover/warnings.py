"""Logs why a quota cannot be used: no node has a GPU model, or the quota limits a model that no node has."""

import structlog

from vcuda.kube import NodeInformer, QuotaInformer
from vcuda.placement.missing_models import model_warnings


class ModelWarnings:
    """Logs each warning once. If a warning no longer applies and later applies again, it is logged again."""

    def __init__(self, quota: QuotaInformer, nodes: NodeInformer) -> None:
        self._quota = quota
        self._nodes = nodes
        self._log = structlog.get_logger()
        self._logged: frozenset[str] | None = None

    def check(self) -> None:
        """Log new warnings. The first check logs nothing, because the controller may be about to label the nodes."""
        if self._logged is None:
            self._logged = frozenset()
            return
        quota, models = self._quota.current(), self._nodes.current().models
        found = model_warnings(quota.models if quota else (), models)
        for warning in found:
            if warning not in self._logged:
                self._log.warning("quota cannot be used", why=warning)
        self._logged = frozenset(found)
