"""Tests of the names that vendors give to the directories of pods, and of the pods that still need a directory."""

import pytest

from controller.garbage.node.names import (
    VM_DIRECTORIES,
    FileKind,
    Form,
    Keep,
    KeepReason,
    PodPresence,
    Trashed,
    keep_in_root,
    moving_name,
    present_uids,
    trash_name,
)
from tests.tables import cases
from vcuda.requests.schemes import SCHEMES, Scheme

UID = "0df28fbd-5f5f-11e8-bc74-36e6bb280816"
ITS, OTHERS = frozenset({UID}), frozenset({"1df28fbd-5f5f-11e8-bc74-36e6bb280816"})
STATIC = "4dbbbc6a1bd7a7d1d1e2b6c6a9c1a4f0"
GPU_MANAGER, HAMI = VM_DIRECTORIES["gpu-manager"], VM_DIRECTORIES["hami"]
UNKNOWN = Keep(KeepReason.PODS_UNKNOWN, "no list")


@pytest.mark.parametrize("scheme", [each for each in SCHEMES if each.pod_directory], ids=lambda scheme: scheme.name)
def test_every_directory_of_a_vendor_leads_to_its_pod(scheme: Scheme) -> None:
    assert scheme.pod_directory
    name = scheme.pod_directory.name.format(uid=UID, container="main")
    form = VM_DIRECTORIES[scheme.name]
    assert (form.root, form.uid(name)) == (scheme.pod_directory.root, UID)
    assert form.read_trashed(trash_name(name, 1)) == Trashed(name, UID, 1, moving=False)
    assert keep_in_root(form, name, FileKind.DIRECTORY, PodPresence(ITS)) == Keep(KeepReason.POD)


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
    form, nobody = VM_DIRECTORIES[scheme], PodPresence(frozenset(), frozenset())
    assert form.uid(name) is None
    assert keep_in_root(form, name, FileKind.DIRECTORY, nobody) == Keep(KeepReason.FOREIGN)


@cases(
    "kind, presence, expected",
    its_pod_is_in_the_API=(FileKind.DIRECTORY, PodPresence(ITS), Keep(KeepReason.POD)),
    kubelet_has_the_pod=(FileKind.DIRECTORY, PodPresence(kubelet=ITS), Keep(KeepReason.KUBELET)),
    neither_the_API_nor_kubelet_answers=(FileKind.DIRECTORY, PodPresence(unknown=UNKNOWN), UNKNOWN),
    its_pod_is_in_the_API_kubelet_is_silent=(
        FileKind.DIRECTORY,
        PodPresence(ITS, unknown=UNKNOWN),
        Keep(KeepReason.POD),
    ),
    no_pod_has_this_UID=(FileKind.DIRECTORY, PodPresence(), None),
    only_another_pod_exists=(FileKind.DIRECTORY, PodPresence(OTHERS, OTHERS), None),
    unknown_kind_of_file_no_pod=(FileKind.UNKNOWN, PodPresence(), None),
    a_link=(FileKind.LINK, PodPresence(), Keep(KeepReason.LINK)),
    a_file=(FileKind.FILE, PodPresence(), Keep(KeepReason.NOT_A_DIRECTORY, "file")),
    a_FIFO=(FileKind.OTHER, PodPresence(), Keep(KeepReason.NOT_A_DIRECTORY, "other")),
)
@pytest.mark.parametrize(
    ("form", "name"), [(GPU_MANAGER, UID), (HAMI, f"{UID}_main")], ids=["uid", "uid and container"]
)
def test_a_directory_stays_by_its_name_and_the_existing_pods(
    form: Form, name: str, kind: FileKind, presence: PodPresence, expected: Keep | None
) -> None:
    assert keep_in_root(form, name, kind, presence) == expected


@cases(
    "kubelet, expected",
    kubelet_was_not_asked=(None, Keep(KeepReason.STATIC)),
    kubelet_has_the_pod=(frozenset({STATIC}), Keep(KeepReason.KUBELET)),
    kubelet_no_longer_has_the_pod=(frozenset[str](), None),
)
def test_a_static_pods_directory_is_removed_only_if_kubelet_confirms(
    kubelet: frozenset[str] | None, expected: Keep | None
) -> None:
    """A static pod may run without a mirror pod, for example if its namespace is missing. The kubelet lists it."""
    assert keep_in_root(GPU_MANAGER, STATIC, FileKind.DIRECTORY, PodPresence(kubelet=kubelet)) == expected


@pytest.mark.parametrize(
    ("annotations", "expected"),
    [
        (None, [UID]),
        ({"kubernetes.io/config.source": "api"}, [UID]),
        ({"kubernetes.io/config.mirror": STATIC, "kubernetes.io/config.hash": STATIC}, [UID, STATIC, STATIC]),
        ({"kubernetes.io/config.mirror": STATIC}, [UID, STATIC]),
        ({"kubernetes.io/config.mirror": STATIC, "kubernetes.io/config.hash": ""}, [UID, STATIC]),
        ({"kubernetes.io/config.hash": STATIC}, [UID]),
    ],
)
def test_only_a_mirror_pod_also_represents_a_static_pod(
    annotations: dict[str, str] | None, expected: list[str]
) -> None:
    assert list(present_uids(UID, annotations)) == expected


@pytest.mark.parametrize(("form", "name"), [(GPU_MANAGER, UID), (HAMI, f"{UID}_main"), (GPU_MANAGER, STATIC)])
def test_a_name_in_the_trash_contains_its_former_name(form: Form, name: str) -> None:
    uid = name.partition("_")[0]
    assert form.read_trashed(trash_name(name, 1700000000)) == Trashed(name, uid, 1700000000, moving=False)
    assert form.read_trashed(moving_name(name, 1700000000)) == Trashed(name, uid, 1700000000, moving=True)


@pytest.mark.parametrize(
    "name",
    [UID, f"{UID}.", f"{UID}.x", f"{UID}.-1", f"{UID}.1.moved", f"{UID}.1.moving.moving", "main.1", f"{UID}_a.1"],
)
def test_other_names_in_the_trash_are_foreign(name: str) -> None:
    assert GPU_MANAGER.read_trashed(name) is None
