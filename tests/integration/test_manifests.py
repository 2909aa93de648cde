"""Every overlay renders, and is what every supported Kubernetes understands, as far as there are schemas of it."""

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

SUPPORTED = ("1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36")
VERSIONS = sorted({version for version in map(major_minor, all_versions()) if version >= SUPPORTED[0]})
"""Those that there are schemas of: what comes after the newest supported one has to understand the manifests too."""

NO_SCHEMA = ("cert-manager.io/", "monitoring.coreos.com/")
"""The groups of kinds that others install, which are in no release."""

PART_OF = ("app.kubernetes.io/part-of", "vcuda-quota")
"""The label by which docs/operations.md looks for what an uninstall left."""

OPTIONS = {"enforce-audit", "node-host-pid"}
"""The components that have no overlay."""

BESIDE_ANY = ("cert-manager", "enforce-audit", "node-host-pid", "prometheus")
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


every_version = pytest.mark.parametrize("version", VERSIONS)


def test_there_is_a_schema_of_every_supported_version() -> None:
    """A new release of the package may drop old ones."""
    assert set(SUPPORTED) <= set(VERSIONS)


@every_version
@pytest.mark.parametrize("overlay", EVERY, ids=named)
def test_every_supported_kubernetes_has_all_of_every_overlay(overlay: Path, version: str) -> None:
    assert unknown(rendered(overlay), version) == set()


every_choice = pytest.mark.parametrize("chosen", TOGETHER.values(), ids=TOGETHER)


@every_choice
@pytest.mark.parametrize("step", [1, -1], ids=["one-way", "the-other-way"])
def test_components_go_together_in_any_order(tmp_path: Path, chosen: tuple[str, ...], step: int) -> None:
    objects = rendered(composed(tmp_path, chosen[::step]))
    assert {version for version in VERSIONS if unknown(objects, version)} == set()
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
