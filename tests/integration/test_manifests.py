"""Every overlay renders, and is what Kubernetes understands: the oldest and the newest that there are schemas of."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import kubernetes_validate  # type: ignore[import-untyped]  # has no types
import pytest
from kubernetes_validate.utils import (  # type: ignore[import-untyped]  # has no types
    SchemaNotFoundError,
    all_versions,
    major_minor,
)

from tests.rendered import EVERY, MANIFESTS, Json, composed, label, rendered

VERSIONS = [major_minor(version) for version in all_versions()]
OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]

LAST = {"kubernetes-1.25": "1.28"}
"""The last Kubernetes that an overlay is for; the others are for the newest."""

FIRST = {"match-conditions": "1.28"}
"""The first Kubernetes that knows every field of an overlay, where that is not the oldest."""

NO_SCHEMA = ("cert-manager.io/", "monitoring.coreos.com/")
"""The groups of kinds that others install, which are in no release."""

PART_OF = ("app.kubernetes.io/part-of", "vcuda-quota")
"""The label by which docs/operations.md looks for what an uninstall left."""

OPTIONS = {"enforce-audit", "node-host-pid"}
"""The components that have no overlay."""

FLOW_CONTROL = {"FlowSchema/vcuda-quota", "PriorityLevelConfiguration/vcuda-quota"}

TOGETHER = ("match-conditions", "cert-manager", "hami", "node-host-pid", "prometheus")


@functools.cache
def known(document: str, version: str) -> bool:
    """Whether a release has the object's kind; ValidationError where it has that and not its fields."""
    try:
        kubernetes_validate.validate(json.loads(document), version, strict=True)
    except SchemaNotFoundError:
        return False
    return True


def unknown(objects: Sequence[Json], version: str) -> set[str]:
    """The objects whose kinds a release does not have, kinds of others aside; every other is valid there."""
    own = [each for each in objects if not each["apiVersion"].startswith(NO_SCHEMA)]
    assert len(own) > len(objects) / 2
    return {label(each) for each in own if not known(json.dumps(each), version)}


def named(overlay: Path) -> str:
    return overlay.name


@pytest.mark.parametrize("overlay", [one for one in EVERY if one.name != "kubernetes-1.20"], ids=named)
def test_the_newest_kubernetes_that_an_overlay_is_for_has_all_of_it(overlay: Path) -> None:
    assert unknown(rendered(overlay), LAST.get(overlay.name, NEWEST)) == set()


@pytest.mark.parametrize("overlay", [one for one in EVERY if one.name != "kubernetes-1.20"], ids=named)
def test_the_oldest_kubernetes_that_has_a_schema_lacks_flow_control_of_the_newest_alone(overlay: Path) -> None:
    """And nothing with the overlay for it. 1.20 itself, which has no schema here, is tried as an API server."""
    lacking = set() if overlay.name == "kubernetes-1.25" else FLOW_CONTROL
    assert unknown(rendered(overlay), FIRST.get(overlay.name, OLDEST)) == lacking


def test_the_overlay_for_1_20_has_older_versions_of_four_kinds_and_is_the_base_in_all_else() -> None:
    """The kinds that have to go by older versions, with those of 1.20; and what 1.20 cannot tell apart."""
    base = {(label(each), each["metadata"].get("namespace")): each for each in rendered(MANIFESTS / "base")}
    changed = {}
    for each in rendered(MANIFESTS / "overlays" / "kubernetes-1.20"):
        before = base.pop((label(each), each["metadata"].get("namespace")))
        if each != before:
            changed[each["kind"]] = each["apiVersion"]
    assert base == {}
    assert changed == {
        "CronJob": "batch/v1beta1",
        "FlowSchema": "flowcontrol.apiserver.k8s.io/v1beta1",
        "PodDisruptionBudget": "policy/v1beta1",
        "PriorityLevelConfiguration": "flowcontrol.apiserver.k8s.io/v1beta1",
        "MutatingWebhookConfiguration": "admissionregistration.k8s.io/v1",
        "ValidatingWebhookConfiguration": "admissionregistration.k8s.io/v1",
    }


@pytest.mark.parametrize("order", [TOGETHER, TOGETHER[::-1]], ids=["one-way", "the-other-way"])
def test_components_go_together_in_any_order(tmp_path: Path, order: tuple[str, ...]) -> None:
    assert unknown(rendered(composed(tmp_path, order)), NEWEST) == set()


def test_components_in_any_order_make_the_same(tmp_path: Path) -> None:
    def sorted_objects(order: Sequence[str], directory: str) -> list[Json]:
        objects = rendered(composed(tmp_path / directory, order))
        return sorted(objects, key=lambda each: (label(each), each["metadata"].get("namespace", "")))

    assert sorted_objects(TOGETHER, "one") == sorted_objects(TOGETHER[::-1], "other")


def test_every_component_has_an_overlay_or_is_an_option_of_one() -> None:
    components = {found.parent.name for found in MANIFESTS.glob("components/*/kustomization.yaml")}
    assert components - {overlay.name for overlay in EVERY} == OPTIONS


@pytest.mark.parametrize("overlay", EVERY, ids=named)
def test_every_object_has_the_label_that_an_uninstall_is_checked_by(overlay: Path) -> None:
    assert unlabelled(rendered(overlay)) == set()


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_every_object_of_an_option_has_that_label_too(tmp_path: Path, option: str) -> None:
    assert unlabelled(rendered(composed(tmp_path, [option]))) == set()


def unlabelled(objects: Sequence[Json]) -> set[str]:
    """The objects without the label."""
    return {label(each) for each in objects if PART_OF not in each["metadata"].get("labels", {}).items()}
