"""Decodes the requests of kube-scheduler to an extender, and encodes the responses.

The format is that of k8s.io/kube-scheduler ``extender/v1``. The Go types of this package have no JSON tags, so their
JSON keys begin with a capital letter. The keys inside pods and nodes begin with a small letter, as usual.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from vcuda import errors, k8s_types
from vcuda.allocations.cards import Unplaceable
from vcuda.k8s_types import Decoder


class ExtenderArgs(msgspec.Struct, frozen=True):
    """A request of kube-scheduler: the pod to schedule, and the nodes that pass the scheduler's own filters.

    ``names``: the names of these nodes.
    ``nodes``: these nodes as JSON, by name; None if the scheduler sends only names (``nodeCacheCapable: true``).
    """

    pod: k8s_types.Pod
    names: tuple[str, ...]
    nodes: Mapping[str, msgspec.Raw] | None = None

    def passing(self, names: Iterable[str]) -> bytes:
        """Return an ExtenderFilterResult with which the scheduler may place the pod on the nodes in ``names``."""
        return self._result(names, {}, "")

    def failing(self, reasons: Mapping[str, Unplaceable]) -> bytes:
        """Return an ExtenderFilterResult without nodes. On nodes with a ``final`` reason, no pod is evicted."""
        return self._result((), reasons, "")

    def failed(self, message: str) -> bytes:
        """Return an ExtenderFilterResult with an error, after which the scheduler retries the pod."""
        return self._result((), {}, _plain(message))

    def _result(self, names: Iterable[str], reasons: Mapping[str, Unplaceable], error: str) -> bytes:
        passed: dict[str, Any]
        if self.nodes is None:
            passed = {"NodeNames": tuple(names), "Nodes": None}
        else:
            passed = {"Nodes": {"metadata": {}, "items": [self.nodes[name] for name in names]}, "NodeNames": None}
        failed = {
            "FailedNodes": {name: reason.text for name, reason in reasons.items() if not reason.final},
            "FailedAndUnresolvableNodes": {name: reason.text for name, reason in reasons.items() if reason.final},
        }
        return msgspec.json.encode({**passed, **failed, "Error": error})


class Victims(msgspec.Struct, frozen=True):
    """The uids of the pods to evict from a node, and the number of PodDisruptionBudgets that the evictions violate."""

    uids: tuple[str, ...]
    violations: int


class PreemptionArgs(msgspec.Struct, frozen=True):
    """A pod that fits on no node, and for each node the pods that the scheduler would evict to make room."""

    pod: k8s_types.Pod
    victims: Mapping[str, Victims]


class BindingArgs(msgspec.Struct, frozen=True):
    """The scheduler's request to bind a pod to ``node``."""

    namespace: str
    name: str
    uid: str
    node: str


_OBJECT = Decoder(dict[str, msgspec.Raw])
_RAWS = msgspec.json.Decoder(tuple[msgspec.Raw, ...] | None)
_NAMES = msgspec.json.Decoder(tuple[str, ...] | None)
_STRING = msgspec.json.Decoder(str)
_IDENTIFIED = Decoder(k8s_types.K8sObject)
_POD = Decoder(k8s_types.Pod)
_ABSENT = msgspec.Raw(b"null")  # Go encodes a nil list or map as null, so null counts as an absent field.


@contextmanager
def _reading(type_name: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, *k8s_types.UNDECODABLE) as error:
        raise errors.BadInput(f"the body must be {type_name} in JSON: {error}") from error


def read_extender_args(body: bytes) -> ExtenderArgs:
    """Decode the ExtenderArgs in the body of a request. Raises BadInput if the body is malformed."""
    with _reading("ExtenderArgs"):
        fields = _OBJECT.decode(body)
        pod = _POD.decode(fields["Pod"])
        names = _NAMES.decode(fields.get("NodeNames", _ABSENT))
        if names is not None:
            return ExtenderArgs(pod, names)
        listed = fields.get("Nodes", _ABSENT)
        items = _OBJECT.decode(listed).get("items", _ABSENT) if listed != _ABSENT else _ABSENT
        # With ``nodeCacheCapable: false`` the response must repeat the nodes unchanged. So keep the JSON of each node.
        nodes = {_IDENTIFIED.decode(raw).metadata.name: raw for raw in _RAWS.decode(items) or ()}
        return ExtenderArgs(pod, tuple(nodes), nodes)


def read_preemption_args(body: bytes) -> PreemptionArgs:
    """Decode the ExtenderPreemptionArgs in the body of a request. Raises BadInput if the body is malformed."""
    with _reading("ExtenderPreemptionArgs"):
        fields = _OBJECT.decode(body)
        pod = _POD.decode(fields["Pod"])
        keys = ("NodeNameToMetaVictims", "NodeNameToVictims")
        listed = next((fields[key] for key in keys if fields.get(key, _ABSENT) != _ABSENT), None)
        by_node = _OBJECT.decode(listed) if listed is not None else {}
        return PreemptionArgs(pod, {node: _victims(raw) for node, raw in by_node.items()})


def _victims(raw: msgspec.Raw) -> Victims:
    fields = _OBJECT.decode(raw)
    pods = _RAWS.decode(fields.get("Pods", _ABSENT)) or ()
    return Victims(tuple(map(_uid, pods)), msgspec.json.decode(fields.get("NumPDBViolations", b"0"), type=int))


def _uid(raw: msgspec.Raw) -> str:
    # For a pod to evict, the scheduler sends either only a UID (in MetaVictims) or the complete pod (in Victims).
    fields = _OBJECT.decode(raw)
    if "metadata" in fields:
        return _IDENTIFIED.decode(raw).metadata.uid
    return _STRING.decode(fields["UID"])


def read_binding_args(body: bytes) -> BindingArgs:
    """Decode the ExtenderBindingArgs in the body of a request. Raises BadInput if the body is malformed."""
    with _reading("ExtenderBindingArgs"):
        fields = _OBJECT.decode(body)
        return BindingArgs(*(_STRING.decode(fields[key]) for key in ("PodNamespace", "PodName", "PodUID", "Node")))


def write_preemption(victims: Mapping[str, Victims]) -> bytes:
    """Encode an ExtenderPreemptionResult: the nodes where preemption helps, and the pods to evict from each node."""
    nodes = {
        node: {"Pods": [{"UID": uid} for uid in each.uids], "NumPDBViolations": each.violations}
        for node, each in victims.items()
    }
    return msgspec.json.encode({"NodeNameToMetaVictims": nodes})


def write_binding(error: str) -> bytes:
    """Encode an ExtenderBindingResult. ``error``: why the pod was not bound; empty if the pod is bound."""
    return msgspec.json.encode({"Error": _plain(error)})


def write_priorities(scores: Mapping[str, int]) -> bytes:
    """Encode a HostPriorityList, which has the score of each node. Scores must be from 0 to 10."""
    return msgspec.json.encode([{"Host": name, "Score": score} for name, score in scores.items()])


def _plain(message: str) -> str:
    # The scheduler uses this error text as a format of Go's ``fmt.Errorf``, so the text must not have percent signs.
    return message.replace("%", " percent")
