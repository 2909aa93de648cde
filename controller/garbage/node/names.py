"""The names of the directories that vendors' device plugins make for pods, and the reasons not to remove them."""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple, Self

import msgspec

from vcuda import errors, k8s_types
from vcuda.requests.schemes import CONTAINER, SCHEMES, UID, PodDirectory

# The uid of a pod is a random UUID (k8s.io/apiserver pkg/registry/rest/meta.go). The uid of a static pod is the MD5 of
# its manifest (pkg/kubelet/config/common.go). If a manifest sets another form of uid, the directory is never removed.
_STATIC = "[0-9a-f]{32}"
_UID = f"(?P<uid>[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}|{_STATIC})"
_CONTAINER = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"  # The API server requires a DNS label as the name of a container.

TRASH = ".trash"
"""The name of the trash, a subdirectory into which the directories of deleted pods are moved before their deletion."""

MOVING = "moving"
"""The suffix that a directory's name has in the trash until the agent has verified that it moved the right one."""

LONGEST_UID = 64
"""Longer uids in annotations of mirror pods are ignored, to save memory. Valid uids have 32 or 36 characters."""

# kubelet sets these annotations on a mirror pod (pkg/kubelet/types). Both contain the uid of the static pod.
_STATIC_UID = (k8s_types.MIRROR_ANNOTATION, "kubernetes.io/config.hash")


class Form(msgspec.Struct, frozen=True):
    """The location and the names of the directories that one vendor's device plugin makes for pods.

    ``root``: the directory that contains the pods' directories.
    ``name``: the pattern of the names of the pods' directories.
    ``trashed``: the pattern of these names in the trash.
    ``own_socket``: the name of the socket on which the device plugin itself listens (see `PodDirectory`).
    """

    root: str
    name: re.Pattern[str]
    trashed: re.Pattern[str]
    own_socket: str = ""

    def uid(self, name: str) -> str | None:
        match = self.name.fullmatch(name)
        return match["uid"] if match else None

    def read_trashed(self, name: str) -> "Trashed | None":
        match = self.trashed.fullmatch(name)
        return Trashed(match["name"], match["uid"], int(match["time"]), bool(match["moving"])) if match else None


class Trashed(NamedTuple):
    """The parts of a directory's name in the trash: its former name, the pod's uid, and the Unix time of the move.

    ``moving``: True if the name ends in `MOVING`, so that the move is not finished.
    """

    name: str
    uid: str
    time: int
    moving: bool


def trash_name(name: str, time: int) -> str:
    return f"{name}.{time}"


def moving_name(name: str, time: int) -> str:
    """Return the name that a directory has in the trash until it is verified that the right directory was moved."""
    return f"{trash_name(name, time)}.{MOVING}"


def form_of(directory: PodDirectory) -> Form:
    name = re.escape(directory.name).replace(re.escape(UID), _UID).replace(re.escape(CONTAINER), _CONTAINER)
    trashed = rf"(?P<name>{name})\.(?P<time>[0-9]{{1,12}})(?P<moving>\.{MOVING})?"
    return Form(directory.root, re.compile(name), re.compile(trashed), directory.own_socket)


VM_DIRECTORIES: Mapping[str, Form] = {
    scheme.name: form_of(scheme.pod_directory) for scheme in SCHEMES if scheme.pod_directory
}
"""The location and the names of the pods' directories, by the scheme of the device plugin that makes them."""


class FileKind(StrEnum):
    """The type of a directory entry."""

    DIRECTORY = "directory"
    FILE = "file"
    LINK = "link"
    SOCKET = "socket"
    OTHER = "other"
    UNKNOWN = "unknown"

    @property
    def may_be_directory(self) -> bool:
        """True if the entry is a directory, or if its type is unknown and can only be found out by opening it."""
        return self in (FileKind.DIRECTORY, FileKind.UNKNOWN)


class Explained(StrEnum):
    """An enumeration whose members each have an explanation for people in the attribute ``why``."""

    why: str

    def __new__(cls, value: str, why: str) -> Self:
        member = str.__new__(cls, value)
        member._value_, member.why = value, why
        return member


class KeepReason(Explained):
    """The reasons not to remove a directory from a node. The values are used in a label of a metric."""

    POD = "pod", "the pod exists"
    KUBELET = "kubelet", "kubelet still has a directory of the pod"
    FOREIGN = "foreign-name", "the name is not that of a directory of this scheme"
    LINK = "link", "the entry is a symbolic link"
    NOT_A_DIRECTORY = "no-directory", "the entry is not a directory"
    STATIC = "static-pod", "the pod is a static pod, which can be checked only with --kubelet-pods"
    KUBELET_UNKNOWN = "kubelet-unknown", "kubelet's directory gives no reliable list of this node's pods"
    PODS_UNKNOWN = "pods-unknown", "the API server gives no reliable list of this node's pods"
    SEEN_ONCE = "seen-once", "only one sweep has found the directory without a pod so far"
    YOUNG = "young", "the directory is younger than --grace"
    RETAINED = "retained", "the directory has been in the trash for less than --trash-retention"
    TOO_MANY = "too-many", "one sweep cannot handle so many directories; a later sweep handles this one"
    MOUNT = "mount", "the directory is or contains a mount point, or is mounted elsewhere"
    LISTENING = "listening", "a process listens on a socket in the directory"
    OPEN = "open", "a process has the directory, or a file in it, open or mapped"
    UNSEEN = "unseen", "the open files of a process could not be read"
    CHANGED = "changed", "the directory was replaced during the sweep"
    INTERRUPTED = "interrupted", "the move of the directory to the trash was interrupted, and its former name is in use"
    ERROR = "error", "an error occurred"

    @property
    def is_expected(self) -> bool:
        """True if this reason to keep a directory disappears without help. For all other reasons, a person must act."""
        return self in _EXPECTED


_EXPECTED = frozenset(
    KeepReason[name] for name in ["POD", "KUBELET", "PODS_UNKNOWN", "SEEN_ONCE", "YOUNG", "RETAINED", "TOO_MANY"]
)


class Keep(msgspec.Struct, frozen=True):
    """The reason why one directory must be kept. ``detail``: more about the reason; may be empty."""

    reason: KeepReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.why}: {self.detail}" if self.detail else self.reason.why


class PodPresence(msgspec.Struct, frozen=True):
    """The pods that exist on this node, according to the API and to kubelet.

    ``pods``: the uids of the pods in the API, in any phase.
    ``kubelet``: the uids in kubelet's directory of pods; None without ``--kubelet-pods``.
    ``unknown``: why no directory may be removed: one of these lists of pods could not be read. None if both were read.
    """

    pods: frozenset[str] = frozenset()
    kubelet: frozenset[str] | None = None
    unknown: Keep | None = None


def keep_in_root(form: Form, name: str, kind: FileKind, presence: PodPresence) -> Keep | None:
    """Return why an entry of --root must be kept; None if the entry is the directory of a pod that does not exist."""
    uid = form.uid(name)
    if uid is None:
        return Keep(KeepReason.FOREIGN)
    if not kind.may_be_directory:
        return Keep(KeepReason.LINK) if kind is FileKind.LINK else Keep(KeepReason.NOT_A_DIRECTORY, kind.value)
    return keep_for_pod(uid, presence)


def keep_for_pod(uid: str, presence: PodPresence) -> Keep | None:
    if uid in presence.pods:
        return Keep(KeepReason.POD)
    if presence.kubelet is not None and uid in presence.kubelet:
        return Keep(KeepReason.KUBELET)
    # The uid of a static pod has no hyphens. A static pod may run while the API has no mirror pod for it. Then only
    # kubelet's directory shows that the static pod exists.
    if presence.unknown is None and presence.kubelet is None and "-" not in uid:
        return Keep(KeepReason.STATIC)
    return presence.unknown


def present_uids(uid: str, annotations: Mapping[str, str] | None) -> Iterator[str]:
    """Yield the uid of a pod in the API. If it is a mirror pod, also yield the uid of its static pod."""
    yield uid
    # A user could set annotations with a static pod's uid on any pod, to protect a directory from removal. So these
    # annotations count only on a pod with the annotation of mirror pods. kubelet deletes a pod with that annotation if
    # no such static pod exists.
    if annotations and k8s_types.MIRROR_ANNOTATION in annotations:
        texts = (annotations.get(key, "") for key in _STATIC_UID)
        yield from (text for text in texts if 0 < len(text) <= LONGEST_UID)


class MustStay(errors.VcudaError):
    """Raised if one directory, or every directory, must be kept for now. ``keep``: the reason."""

    def __init__(self, reason: KeepReason, detail: str = "") -> None:
        self.keep = Keep(reason, detail)
        super().__init__(str(self.keep))


def keep_after(error: errors.VcudaError | OSError) -> Keep:
    if isinstance(error, MustStay):
        return error.keep
    if isinstance(error, OSError):
        return Keep(KeepReason.ERROR, error.strerror or str(error))
    return Keep(KeepReason.PODS_UNKNOWN, str(error))
