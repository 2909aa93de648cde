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

from tests.rendered import EVERY, MANIFESTS, Json, composed, container, label, ours, pod_spec, rendered

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

OF_1_20 = {
    "CronJob": "batch/v1beta1",
    "FlowSchema": "flowcontrol.apiserver.k8s.io/v1beta1",
    "PodDisruptionBudget": "policy/v1beta1",
    "PriorityLevelConfiguration": "flowcontrol.apiserver.k8s.io/v1beta1",
}
"""The kinds whose versions in the base are newer than 1.20, with those that it has."""

BESIDE_ANY = ("match-conditions", "cert-manager", "enforce-audit", "node-host-pid", "prometheus")
TOGETHER = {"hami": ("hami", *BESIDE_ANY), "scheduler": ("scheduler", "gpu-manager", *BESIDE_ANY)}
"""All components that go together: HAMi has a scheduler of its own, and directories of its own."""


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
        **OF_1_20,
        "MutatingWebhookConfiguration": "admissionregistration.k8s.io/v1",
        "ValidatingWebhookConfiguration": "admissionregistration.k8s.io/v1",
    }


every_choice = pytest.mark.parametrize("chosen", TOGETHER.values(), ids=TOGETHER)


@every_choice
@pytest.mark.parametrize("step", [1, -1], ids=["one-way", "the-other-way"])
def test_components_go_together_in_any_order(tmp_path: Path, chosen: tuple[str, ...], step: int) -> None:
    objects = rendered(composed(tmp_path, chosen[::step]))
    assert unknown(objects, NEWEST) == set()
    for workload in ours(objects):
        names = [flag.partition("=")[0] for flag in container(workload)["args"]]
        assert len(names) == len(set(names)), label(workload)


@every_choice
def test_components_in_any_order_make_the_same(tmp_path: Path, chosen: tuple[str, ...]) -> None:
    """But for the order of flags."""

    def sorted_objects(order: Sequence[str], directory: str) -> list[Json]:
        objects = rendered(composed(tmp_path / directory, order))
        for workload in ours(objects):
            pod_spec(workload)["containers"][0]["args"].sort()
        return sorted(objects, key=lambda each: (label(each), each["metadata"].get("namespace", "")))

    assert sorted_objects(chosen, "one") == sorted_objects(chosen[::-1], "other")


@every_choice
def test_before_the_component_for_1_20_all_others_are_made_fit_for_it_too(
    tmp_path: Path, chosen: tuple[str, ...]
) -> None:
    objects = rendered(composed(tmp_path, (*chosen, "kubernetes-1.20")))
    found = {(each["kind"], each["apiVersion"]) for each in objects if each["kind"] in OF_1_20}
    assert found
    assert found <= OF_1_20.items()


@every_choice
@pytest.mark.parametrize("version", VERSIONS[: VERSIONS.index(LAST["kubernetes-1.25"]) + 1])
def test_before_the_component_for_1_25_all_others_are_made_fit_for_it_too(
    tmp_path: Path, chosen: tuple[str, ...], version: str
) -> None:
    fit = [each for each in chosen if FIRST.get(each, version) <= version]
    assert unknown(rendered(composed(tmp_path, (*fit, "kubernetes-1.25"))), version) == set()


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
