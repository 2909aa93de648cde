"""The directories that vendors keep on a node for each pod: how they are named, and whether one may be deleted."""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple, Self

import msgspec

from vcuda import errors, k8s_types
from vcuda.requests.schemes import CONTAINER, SCHEMES, UID, PodDirectory

# The API server makes random UUIDs (k8s.io/apiserver pkg/registry/rest/meta.go), kubelet the MD5 of a static pod's
# manifest (pkg/kubelet/config/common.go). A static pod may also bring any text as its uid: such a name is foreign.
_STATIC = "[0-9a-f]{32}"
_UID = f"(?P<uid>[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}|{_STATIC})"
_CONTAINER = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"  # a DNS label, as the API server demands of a container's name

TRASH = ".trash"
"""Name of the directory beside the others that takes what is to be deleted."""

MOVING = "moving"
"""Last part of the name of what was moved into the trash and has not been looked at since."""

LONGEST_UID = 64
"""Characters of a uid that are kept: kubelet's have 32 or 36. No directory is named after a longer one."""

_STATIC_UID = (k8s_types.MIRROR_ANNOTATION, "kubernetes.io/config.hash")  # pkg/kubelet/types: each holds it


class Form(msgspec.Struct, frozen=True):
    """Where one scheme keeps its directories on a node, and how it names them."""

    root: str
    name: re.Pattern[str]
    trashed: re.Pattern[str]

    def uid(self, name: str) -> str | None:
        """Return the pod's uid in a directory's name, or None where the name is of another form."""
        match = self.name.fullmatch(name)
        return match["uid"] if match else None

    def read_trashed(self, name: str) -> "Trashed | None":
        """Return what the name of something in the trash says, or None where it is of another form."""
        match = self.trashed.fullmatch(name)
        return Trashed(match["name"], match["uid"], int(match["time"]), bool(match["moving"])) if match else None


class Trashed(NamedTuple):
    """Something in the trash: its former name, the pod's uid, when it was moved (Unix seconds); see `MOVING`."""

    name: str
    uid: str
    time: int
    moving: bool


def trash_name(name: str, time: int) -> str:
    """Return the name in the trash of what is moved there at ``time`` (Unix seconds)."""
    return f"{name}.{time}"


def moving_name(name: str, time: int) -> str:
    """Return its name there until it is known to be what was to be moved."""
    return f"{trash_name(name, time)}.{MOVING}"


def form_of(directory: PodDirectory) -> Form:
    """Return the form of a vendor's directories."""
    name = re.escape(directory.name).replace(re.escape(UID), _UID).replace(re.escape(CONTAINER), _CONTAINER)
    trashed = rf"(?P<name>{name})\.(?P<time>[0-9]{{1,12}})(?P<moving>\.{MOVING})?"
    return Form(directory.root, re.compile(name), re.compile(trashed))


VM_DIRECTORIES: Mapping[str, Form] = {
    scheme.name: form_of(scheme.pod_directory) for scheme in SCHEMES if scheme.pod_directory
}
"""By the scheme's name."""


class FileKind(StrEnum):
    """What a name in a directory stands for."""

    DIRECTORY = "directory"
    FILE = "file"
    LINK = "link"
    SOCKET = "socket"
    OTHER = "other"
    UNKNOWN = "unknown"

    @property
    def may_be_directory(self) -> bool:
        """Whether it is one, or does not let itself be asked: opening it tells."""
        return self in (FileKind.DIRECTORY, FileKind.UNKNOWN)


class Explained(StrEnum):
    """Names of which each has a clause for people, ``why``."""

    why: str

    def __new__(cls, value: str, why: str) -> Self:
        """Make a member; its text is the name."""
        member = str.__new__(cls, value)
        member._value_, member.why = value, why
        return member


class KeepReason(Explained):
    """Why a directory is kept; the values are labels of a metric."""

    POD = "pod", "its pod exists"
    KUBELET = "kubelet", "kubelet still keeps its pod"
    FOREIGN = "foreign-name", "not a name of this scheme"
    LINK = "link", "a link"
    NOT_A_DIRECTORY = "no-directory", "no directory"
    STATIC = "static-pod", "only kubelet knows static pods, and its directory was not given"
    KUBELET_UNKNOWN = "kubelet-unknown", "it is not known which pods kubelet keeps"
    PODS_UNKNOWN = "pods-unknown", "it is not known which pods exist"
    SEEN_ONCE = "seen-once", "not seen twice in a row without its pod yet"
    YOUNG = "young", "too young"
    RETAINED = "retained", "its stay in the trash is not over"
    TOO_MANY = "too-many", "so many wait that its turn comes later"
    MOUNT = "mount", "a mount belongs to it"
    LISTENING = "listening", "a process listens on a socket in it"
    OPEN = "open", "a process holds it, or a file in it, open or mapped"
    UNSEEN = "unseen", "what a process holds open could not be seen"
    CHANGED = "changed", "it was exchanged for something else meanwhile"
    INTERRUPTED = "interrupted", "its move was interrupted, and its name is taken"
    ERROR = "error", "an error"

    @property
    def is_expected(self) -> bool:
        """Whether it passes by itself; the others are for somebody to look at."""
        return self in _EXPECTED


_EXPECTED = frozenset(
    KeepReason[name] for name in ["POD", "KUBELET", "PODS_UNKNOWN", "SEEN_ONCE", "YOUNG", "RETAINED", "TOO_MANY"]
)


class Keep(msgspec.Struct, frozen=True):
    """A reason, and what makes it that in this case; ``detail`` may be empty."""

    reason: KeepReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.why}: {self.detail}" if self.detail else self.reason.why


class PodPresence(msgspec.Struct, frozen=True):
    """What is known of the node's pods.

    ``pods``: uids in the API, whatever their phase. ``kubelet``: uids that kubelet keeps on disk, None where nobody
    said where. ``unknown``: why nothing may go at all, as the one or the other is not known; None where both are.
    """

    pods: frozenset[str] = frozenset()
    kubelet: frozenset[str] | None = None
    unknown: Keep | None = None


def keep_in_root(form: Form, name: str, kind: FileKind, presence: PodPresence) -> Keep | None:
    """Return why something in the root stays, as far as its name and the pods tell; None where its pod is gone."""
    uid = form.uid(name)
    if uid is None:
        return Keep(KeepReason.FOREIGN)
    if not kind.may_be_directory:
        return Keep(KeepReason.LINK) if kind is FileKind.LINK else Keep(KeepReason.NOT_A_DIRECTORY, kind.value)
    return keep_for_pod(uid, presence)


def keep_for_pod(uid: str, presence: PodPresence) -> Keep | None:
    """Return why a pod is not known to be gone; None where it is."""
    if uid in presence.pods:
        return Keep(KeepReason.POD)
    if presence.kubelet is not None and uid in presence.kubelet:
        return Keep(KeepReason.KUBELET)
    # kubelet made a uid without hyphens, for a static pod: that may run while the API has no mirror of it.
    if presence.unknown is None and presence.kubelet is None and "-" not in uid:
        return Keep(KeepReason.STATIC)
    return presence.unknown


def present_uids(uid: str, annotations: Mapping[str, str] | None) -> Iterator[str]:
    """Yield the uids under which a pod of the API exists: its own and, of a mirror pod, the static pod's."""
    yield uid
    # Anyone may write these on a pod, to keep what another left behind. A pod that claims to be a mirror, and is that
    # of no static pod, kubelet deletes at once; without that claim the others say nothing.
    if annotations and k8s_types.MIRROR_ANNOTATION in annotations:
        texts = (annotations.get(key, "") for key in _STATIC_UID)
        yield from (text for text in texts if 0 < len(text) <= LONGEST_UID)


class MustStay(errors.VcudaError):
    """This directory, or for now every one, stays: ``keep`` tells why."""

    def __init__(self, reason: KeepReason, detail: str = "") -> None:
        self.keep = Keep(reason, detail)
        super().__init__(str(self.keep))


def keep_after(error: errors.VcudaError | OSError) -> Keep:
    """Return what went wrong as a reason to keep what it befell; an error of ours that is no refusal is the API's."""
    if isinstance(error, MustStay):
        return error.keep
    if isinstance(error, OSError):
        return Keep(KeepReason.ERROR, error.strerror or str(error))
    return Keep(KeepReason.PODS_UNKNOWN, str(error))
