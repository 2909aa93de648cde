"""Tests of the label by which the webhook is not called for a namespace without a quota."""

import json
from typing import Any

import pytest

from controller.recount.labels import ENFORCED_LABEL, PROBE_POLICY, NamespaceLabels
from tests.api_double import ApiDouble
from tests.quota_map import store_quota
from tests.tables import cases
from vcuda.errors import ApiError
from vcuda.kube import QuotaInformer, QuotaSource
from vcuda.registration import PROBE

TEAM = "/api/v1/namespaces/team-a"
LIMITED, FREE = {"team-a": {"quota": {"M40": 1}}}, {"team-b": {"quota": {"M40": 1}}}


class Labelled(ApiDouble):
    """An API server with namespace team-a. ``asks``: whether it already calls the webhook for the namespace."""

    def __init__(self, document: Any, label: str | None, asks: bool = True, **teams: str) -> None:
        super().__init__()
        self.asks = asks
        self.rejecting: set[str] = set()
        store_quota(self, json.dumps(document), **teams)
        self.store(TEAM, {"metadata": {"name": "team-a", "labels": {ENFORCED_LABEL: label} if label else {}}})
        self.quota = QuotaInformer(self.kube, QuotaSource(), frozenset())
        self.quota.reflector.relist()
        self.labels = NamespaceLabels(self.kube, self.quota, lambda _: None)

    def post(self, path: str, body: bytes, params: Any = None, timeout: float = 10) -> bytes:
        if path in self.rejecting:
            raise ApiError(403, "the namespace is being terminated")
        assert (path, params) == (f"{TEAM}/configmaps", {"dryRun": "All"}), "the probe must be a dry run"
        assert json.loads(body)["metadata"]["name"] == PROBE
        if self.asks:
            raise ApiError(403, f"ValidatingAdmissionPolicy '{PROBE_POLICY}' denied request")
        return self.get(TEAM, timeout=timeout)

    def labelled(self) -> str | None:
        """Let the controller handle namespace team-a once. Return the namespace's label after that."""
        self.labels.reflector.relist()
        self.labels.reconciler.turn("team-a")
        value: str | None = self.objects[TEAM]["metadata"]["labels"].get(ENFORCED_LABEL)
        return value


@cases(
    "document, label, asks, becomes",
    limited_never_labelled=(LIMITED, None, False, None),
    newly_limited=(LIMITED, "false", False, "taking-effect"),
    limit_not_in_effect_yet=(LIMITED, "taking-effect", False, "taking-effect"),
    limit_in_effect=(LIMITED, "taking-effect", True, None),
    limited_label_set_by_hand=(LIMITED, "true", True, None),
    limited_by_the_default_entry=({"*": {"quota": {}}}, "false", True, "taking-effect"),
    excepted_from_the_default_entry=({"*": {"quota": {}, "except": ["team-*"]}}, None, True, "false"),
    no_longer_excepted=({"*": {"quota": {}, "except": ["lab"]}}, "false", True, "taking-effect"),
    without_a_limit=(FREE, None, True, "false"),
    limit_removed=(FREE, "taking-effect", True, "false"),
    without_a_limit_label_set_by_hand=(FREE, "true", True, "false"),
)
def test_the_label_follows_the_quota(document: Any, label: str | None, asks: bool, becomes: str | None) -> None:
    api = Labelled(document, label, asks)
    assert api.labelled() == becomes
    assert api.labels.is_taking_effect("team-a") is (label is not None)


@cases(
    "item, label, becomes",
    a_name=("team-a", "false", "taking-effect"),
    a_beginning=("'team-*'", "false", "taking-effect"),
    another_name=("team-b", None, "false"),
    another_beginning=("'team-b*'", "taking-effect", "false"),
)
def test_the_label_follows_the_membership_in_a_team(item: str, label: str | None, becomes: str) -> None:
    api = Labelled({}, label, gpu_teams=f"vision: {{namespaces: [{item}]}}")
    assert api.labelled() == becomes


@pytest.mark.parametrize("newer", [LIMITED, {"*": {"quota": {}}}, {"team-a": "malformed"}])
def test_no_namespace_is_exempted_by_an_outdated_document(newer: Any) -> None:
    """If an outdated quota exempted a namespace from the webhook, its first pods would be stored without a charge."""
    api = Labelled(FREE, None)
    store_quota(api, json.dumps(newer))
    assert api.labelled() is None


def test_a_terminating_namespace_is_not_labelled() -> None:
    api = Labelled(FREE, None)
    metadata = {"name": "team-a", "labels": {}, "deletionTimestamp": "2026-01-01T00:00:00Z"}
    api.store(TEAM, {"metadata": metadata})
    assert api.labelled() is None


@cases(
    "document, label, asks, evaluated",
    limited=(LIMITED, None, True, True),
    limited_but_ignored=(LIMITED, None, False, False),
    stays_in_the_state_taking_effect=(LIMITED, "taking-effect", False, False),
    without_a_limit=(FREE, None, False, True),
    not_labelled_yet=(LIMITED, "false", False, True),
)
def test_a_policy_that_the_api_server_does_not_evaluate_is_found_by_a_limited_namespace(
    document: Any, label: str | None, asks: bool, evaluated: bool
) -> None:
    api = Labelled(document, label, asks)
    api.labels.reflector.relist()
    assert api.labels.is_evaluated() is evaluated


@cases("ends", seen={"deletionTimestamp": "2026-01-01T00:00:00Z"}, unseen={})
@pytest.mark.parametrize("evaluated", [True, False])
def test_a_namespace_that_is_being_deleted_does_not_show_whether_policies_are_evaluated(
    ends: dict[str, str], evaluated: bool
) -> None:
    api = Labelled({"*": {"quota": {"M40": 1}}}, None, evaluated)
    ending = "/api/v1/namespaces/a-ending"
    api.store(ending, {"metadata": {"name": "a-ending", "labels": {}, **ends}})
    api.rejecting.add(f"{ending}/configmaps")
    api.objects[TEAM] = api.objects.pop(TEAM)  # so that the namespace that is being deleted is listed first
    api.labels.reflector.relist()
    assert api.labels.is_evaluated() is evaluated


def test_if_no_namespace_shows_whether_policies_are_evaluated_the_error_is_raised() -> None:
    api = Labelled(LIMITED, None)
    api.rejecting.add(f"{TEAM}/configmaps")
    api.labels.reflector.relist()
    with pytest.raises(ApiError):
        api.labels.is_evaluated()
