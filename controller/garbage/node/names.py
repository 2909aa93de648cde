"""The names of the vendors' directories for pods on a node, and the reasons to keep a directory."""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple, Self

import msgspec

from vcuda import errors, k8s_types
from vcuda.requests.schemes import CONTAINER, SCHEMES, UID, PodDirectory

# The API server makes random UUIDs (k8s.io/apiserver pkg/registry/rest/meta.go). For a static pod kubelet uses the MD5
# of its manifest (pkg/kubelet/config/common.go). A static pod may also set any text as its uid; its directory is kept.
_STATIC = "[0-9a-f]{32}"
_UID = f"(?P<uid>[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}|{_STATIC})"
_CONTAINER = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"  # a DNS label, which the API server requires for container names

TRASH = ".trash"
"""The name of the trash, a directory in the root that holds the directories to delete."""

MOVING = "moving"
"""The suffix of a directory that was moved into the trash and has not been checked there yet."""

LONGEST_UID = 64
"""The most characters of a uid that is kept. kubelet's have 32 or 36, and no directory has a longer one in its name."""

_STATIC_UID = (
    k8s_types.MIRROR_ANNOTATION,
    "kubernetes.io/config.hash",
)  # pkg/kubelet/types; both have a static pod's uid


class Form(msgspec.Struct, frozen=True):
    """The root directory of one scheme on a node, and the patterns of the names in the root and in the trash.

    ``own_socket``: see `PodDirectory`.
    """

    root: str
    name: re.Pattern[str]
    trashed: re.Pattern[str]
    own_socket: str = ""

    def uid(self, name: str) -> str | None:
        """Return the pod's uid in a directory's name; None if the name has another form."""
        match = self.name.fullmatch(name)
        return match["uid"] if match else None

    def read_trashed(self, name: str) -> "Trashed | None":
        """Return the parts of a name in the trash; None if the name has another form."""
        match = self.trashed.fullmatch(name)
        return Trashed(match["name"], match["uid"], int(match["time"]), bool(match["moving"])) if match else None


class Trashed(NamedTuple):
    """A name in the trash: the former name, the pod's uid, and the time of the move in Unix seconds; see `MOVING`."""

    name: str
    uid: str
    time: int
    moving: bool


def trash_name(name: str, time: int) -> str:
    """Return the name in the trash for a directory that is moved at ``time`` (Unix seconds)."""
    return f"{name}.{time}"


def moving_name(name: str, time: int) -> str:
    """Return the name in the trash until the moved directory is verified to be the one that was checked."""
    return f"{trash_name(name, time)}.{MOVING}"


def form_of(directory: PodDirectory) -> Form:
    name = re.escape(directory.name).replace(re.escape(UID), _UID).replace(re.escape(CONTAINER), _CONTAINER)
    trashed = rf"(?P<name>{name})\.(?P<time>[0-9]{{1,12}})(?P<moving>\.{MOVING})?"
    return Form(directory.root, re.compile(name), re.compile(trashed), directory.own_socket)


VM_DIRECTORIES: Mapping[str, Form] = {
    scheme.name: form_of(scheme.pod_directory) for scheme in SCHEMES if scheme.pod_directory
}
"""The directories of each scheme, by its name."""


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
        """Whether the entry is a directory, or of an unknown type, which only opening it shows."""
        return self in (FileKind.DIRECTORY, FileKind.UNKNOWN)


class Explained(StrEnum):
    """An enumeration whose members have an explanation, ``why``."""

    why: str

    def __new__(cls, value: str, why: str) -> Self:
        member = str.__new__(cls, value)
        member._value_, member.why = value, why
        return member


class KeepReason(Explained):
    """The reason why a directory is kept. The values are label values of a metric."""

    POD = "pod", "its pod exists"
    KUBELET = "kubelet", "kubelet still keeps its pod"
    FOREIGN = "foreign-name", "its name is not of this scheme"
    LINK = "link", "it is a symbolic link"
    NOT_A_DIRECTORY = "no-directory", "it is not a directory"
    STATIC = "static-pod", "its pod is static, and --kubelet-pods was not given to check for it"
    KUBELET_UNKNOWN = "kubelet-unknown", "kubelet's pods are not known"
    PODS_UNKNOWN = "pods-unknown", "the existing pods are not known"
    SEEN_ONCE = "seen-once", "only one sweep has found it without its pod so far"
    YOUNG = "young", "it is too young"
    RETAINED = "retained", "its time in the trash is not over"
    TOO_MANY = "too-many", "too many directories; a later sweep handles it"
    MOUNT = "mount", "it is, contains or backs a mount"
    LISTENING = "listening", "a process listens on a socket in it"
    OPEN = "open", "a process holds it, or a file in it, open or mapped"
    UNSEEN = "unseen", "the open files of a process could not be read"
    CHANGED = "changed", "it was replaced during the sweep"
    INTERRUPTED = "interrupted", "its move was interrupted, and its former name is in use"
    ERROR = "error", "an error occurred"

    @property
    def is_expected(self) -> bool:
        """Whether the reason ends without intervention. Other reasons need a person."""
        return self in _EXPECTED


_EXPECTED = frozenset(
    KeepReason[name] for name in ["POD", "KUBELET", "PODS_UNKNOWN", "SEEN_ONCE", "YOUNG", "RETAINED", "TOO_MANY"]
)


class Keep(msgspec.Struct, frozen=True):
    """The reason to keep one directory; ``detail`` may be empty."""

    reason: KeepReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.why}: {self.detail}" if self.detail else self.reason.why


class PodPresence(msgspec.Struct, frozen=True):
    """The pods of the node.

    ``pods``: the uids in the API, in any phase.
    ``kubelet``: the uids in kubelet's directory; None without ``--kubelet-pods``.
    ``unknown``: the reason to keep everything if either is not known; None if both are known.
    """

    pods: frozenset[str] = frozenset()
    kubelet: frozenset[str] | None = None
    unknown: Keep | None = None


def keep_in_root(form: Form, name: str, kind: FileKind, presence: PodPresence) -> Keep | None:
    """Return the reason to keep an entry of the root by its name, type and pod; None if its pod does not exist."""
    uid = form.uid(name)
    if uid is None:
        return Keep(KeepReason.FOREIGN)
    if not kind.may_be_directory:
        return Keep(KeepReason.LINK) if kind is FileKind.LINK else Keep(KeepReason.NOT_A_DIRECTORY, kind.value)
    return keep_for_pod(uid, presence)


def keep_for_pod(uid: str, presence: PodPresence) -> Keep | None:
    """Return the reason to keep a pod's directory; None if the pod does not exist."""
    if uid in presence.pods:
        return Keep(KeepReason.POD)
    if presence.kubelet is not None and uid in presence.kubelet:
        return Keep(KeepReason.KUBELET)
    # A uid without hyphens is from kubelet, for a static pod. Such a pod may run while its mirror pod does not exist.
    if presence.unknown is None and presence.kubelet is None and "-" not in uid:
        return Keep(KeepReason.STATIC)
    return presence.unknown


def present_uids(uid: str, annotations: Mapping[str, str] | None) -> Iterator[str]:
    """Yield the uid of a pod in the API and, if it is a mirror pod, the uid of its static pod."""
    yield uid
    # Any user may set these annotations on a pod, to keep another pod's directory. kubelet at once deletes a pod that
    # has the mirror annotation but no static pod. So the others count only together with the mirror annotation.
    if annotations and k8s_types.MIRROR_ANNOTATION in annotations:
        texts = (annotations.get(key, "") for key in _STATIC_UID)
        yield from (text for text in texts if 0 < len(text) <= LONGEST_UID)


class MustStay(errors.VcudaError):
    """A directory, or for now every directory, must stay; ``keep`` has the reason."""

    def __init__(self, reason: KeepReason, detail: str = "") -> None:
        self.keep = Keep(reason, detail)
        super().__init__(str(self.keep))


def keep_after(error: errors.VcudaError | OSError) -> Keep:
    """Return an error as a reason to keep a directory. Any VcudaError but MustStay is an error of the API server."""
    if isinstance(error, MustStay):
        return error.keep
    if isinstance(error, OSError):
        return Keep(KeepReason.ERROR, error.strerror or str(error))
    return Keep(KeepReason.PODS_UNKNOWN, str(error))
