"""The names of the directories that vendors' device plugins make for pods, and the reasons not to delete them."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Self

import msgspec

from vcuda import errors
from vcuda.requests.schemes import CONTAINER, SCHEMES, UID, PodDirectory

# The uid of a pod is a random UUID (k8s.io/apiserver pkg/registry/rest/meta.go). The uid of a static pod is the MD5 of
# its manifest (pkg/kubelet/config/common.go). If a manifest sets another form of uid, the directory is never deleted.
_UID = "(?P<uid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})"
_CONTAINER = "[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"  # The API server requires a DNS label as the name of a container.


class Form(msgspec.Struct, frozen=True):
    """The location and the names of the directories that one vendor's device plugin makes for pods.

    ``root``: the directory that contains the pods' directories.
    ``name``: the pattern of the names of the pods' directories.
    """

    root: str
    name: re.Pattern[str]

    def uid(self, name: str) -> str | None:
        match = self.name.fullmatch(name)
        return match["uid"] if match else None


def form_of(directory: PodDirectory) -> Form:
    name = re.escape(directory.name).replace(re.escape(UID), _UID).replace(re.escape(CONTAINER), _CONTAINER)
    return Form(directory.root, re.compile(name))


VM_DIRECTORIES: Mapping[str, Form] = {
    scheme.name: form_of(scheme.pod_directory) for scheme in SCHEMES if scheme.pod_directory
}
"""The location and the names of the pods' directories, by the scheme of the device plugin that makes them."""


class Explained(StrEnum):
    """An enumeration whose members each have an explanation for people in the attribute ``why``."""

    why: str

    def __new__(cls, value: str, why: str) -> Self:
        member = str.__new__(cls, value)
        member._value_, member.why = value, why
        return member


class KeepReason(Explained):
    """The reasons not to delete a directory from a node. The values are used in a label of a metric."""

    POD = "pod", "the pod exists"
    KUBELET = "kubelet", "kubelet still has a directory of the pod"
    FOREIGN = "foreign-name", "the name is not that of a directory of this scheme"
    LINK = "link", "the entry is a symbolic link"
    NOT_A_DIRECTORY = "no-directory", "the entry is not a directory"
    STATIC = "static-pod", "a static pod that may have cards is on the node, and may use the directory"
    KUBELET_UNKNOWN = "kubelet-unknown", "kubelet's directory gives no reliable list of this node's pods"
    PODS_UNKNOWN = "pods-unknown", "the API server gives no reliable list of this node's pods"
    SEEN_ONCE = "seen-once", "only one sweep has found the directory without a pod so far"
    YOUNG = "young", "the directory is younger than --grace"
    TOO_MANY = "too-many", "one sweep cannot handle so many directories; a later sweep handles this one"
    MOUNT = "mount", "the directory is or contains a mount point"
    CHANGED = "changed", "the directory was replaced during the sweep"
    ERROR = "error", "an error occurred"

    @property
    def is_expected(self) -> bool:
        """True if this reason to keep a directory ends without help. For all other reasons, a person must act."""
        return self in _EXPECTED


_EXPECTED = frozenset(KeepReason[name] for name in ["POD", "KUBELET", "PODS_UNKNOWN", "SEEN_ONCE", "YOUNG", "TOO_MANY"])


class Keep(msgspec.Struct, frozen=True):
    """The reason why one directory must be kept. ``detail``: more about the reason; may be empty."""

    reason: KeepReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason.why}: {self.detail}" if self.detail else self.reason.why


class MustStay(errors.VcudaError):
    """Raised if one directory, or every directory, must not be deleted now. ``keep``: the reason."""

    def __init__(self, reason: KeepReason, detail: str = "") -> None:
        self.keep = Keep(reason, detail)
        super().__init__(str(self.keep))


def keep_after(error: errors.VcudaError | OSError) -> Keep:
    if isinstance(error, MustStay):
        return error.keep
    if isinstance(error, OSError):
        return Keep(KeepReason.ERROR, error.strerror or str(error))
    return Keep(KeepReason.PODS_UNKNOWN, str(error))
