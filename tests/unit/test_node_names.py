"""Tests of the names that vendors give to the directories of pods, and of the pods that still need a directory."""

import pytest

from controller.garbage.node.names import VM_DIRECTORIES, Keep, KeepReason
from controller.garbage.node.pods import Presence
from tests.tables import cases
from vcuda.requests.schemes import SCHEMES, Scheme

UID = "0df28fbd-5f5f-11e8-bc74-36e6bb280816"
ITS, OTHERS = frozenset({UID}), frozenset({"1df28fbd-5f5f-11e8-bc74-36e6bb280816"})
STATIC = "4dbbbc6a1bd7a7d1d1e2b6c6a9c1a4f0"


@pytest.mark.parametrize("scheme", [each for each in SCHEMES if each.pod_directory], ids=lambda scheme: scheme.name)
def test_every_directory_of_a_vendor_leads_to_its_pod(scheme: Scheme) -> None:
    assert scheme.pod_directory
    name = scheme.pod_directory.name.format(uid=UID, container="main")
    form = VM_DIRECTORIES[scheme.name]
    assert (form.root, form.uid(name)) == (scheme.pod_directory.root, UID)


@pytest.mark.parametrize(
    ("scheme", "root", "name"),
    [
        ("gpu-manager", "/etc/gpu-manager/vm", UID),
        ("nvidia-vcuda", "/etc/gpu-manager/vm", UID),
        ("hami", "/usr/local/vgpu/containers", f"{UID}_main"),
        ("vgpu-manager", "/etc/vgpu-manager", f"{UID}_main"),
        ("gpu-manager", "/etc/gpu-manager/vm", STATIC),
        ("hami", "/usr/local/vgpu/containers", f"{STATIC}_a-0"),
    ],
)
def test_a_name_of_the_scheme_contains_the_pods_uid(scheme: str, root: str, name: str) -> None:
    form = VM_DIRECTORIES[scheme]
    assert (form.root, form.uid(name)) == (root, name.partition("_")[0])


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        *(("gpu-manager", name) for name in ("", "..", f"../{UID}", f"{UID}/..", f"{UID}..", f" {UID}", f"{UID}\n")),
        *(("gpu-manager", name) for name in (UID.upper(), UID.replace("-", "")[:31], UID.replace("-", "_"), UID[:-1])),
        *(("gpu-manager", name) for name in (f"{UID}0", "\u0660" + UID[1:], f"{UID}_main", f"{UID}.1700000000")),
        *(
            ("hami", f"{UID}_{name}")
            for name in ("", "-main", "main-", "Main", "a.b", "..", "a_b", "main\udcff", 64 * "a")
        ),
        ("hami", UID),
        ("vgpu-manager", "config"),
    ],
)
def test_any_other_name_is_foreign(scheme: str, name: str) -> None:
    assert VM_DIRECTORIES[scheme].uid(name) is None


@cases(
    "presence, expected",
    its_pod_is_in_the_API=(Presence(ITS), Keep(KeepReason.POD)),
    kubelet_has_the_pod=(Presence(kubelet=ITS), Keep(KeepReason.KUBELET)),
    both_have_the_pod=(Presence(ITS, ITS), Keep(KeepReason.POD)),
    no_pod_has_this_UID=(Presence(), None),
    only_another_pod_exists=(Presence(OTHERS, OTHERS), None),
    a_static_pod_may_use_it=(Presence(static=STATIC), Keep(KeepReason.STATIC, STATIC)),
)
def test_a_directory_stays_by_the_existing_pods(presence: Presence, expected: Keep | None) -> None:
    assert presence.keep(UID) == expected


def test_kubelets_directory_alone_decides_about_the_own_uid_of_a_static_pod() -> None:
    assert Presence(static=STATIC[::-1]).keep(STATIC) is None
    assert Presence(kubelet=frozenset({STATIC})).keep(STATIC) == Keep(KeepReason.KUBELET)
