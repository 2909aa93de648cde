"""Counts the charges (GPU quota taken) of one namespace's pods and ResourceClaims. A count uses consistent LISTs."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from vcuda import errors, k8s_types
from vcuda.allocations.stored_claims import ClaimCharge, ClaimPrice, ClaimReader, StoredClaim, charged_by_pods
from vcuda.allocations.stored_pods import ClaimUser, StoredPod, charges_of, read_claim_user, read_stored
from vcuda.claims.names import API_PATH
from vcuda.k8s_types import Decoder
from vcuda.kube import client, objects
from vcuda.kube.pages import Page
from vcuda.kube.turns import ListTurns
from vcuda.ledger.ledger import charges_by_model, long_grace, long_graces
from vcuda.ledger.recount import ObservedClaims, ObservedPods
from vcuda.placement.nodes import Nodes
from vcuda.requests.resources import GpuResources

T = TypeVar("T")

PricedClaims = Sequence[tuple[StoredClaim, ClaimCharge]]
"""Pairs of a ResourceClaim and its charge (the GPU quota that it takes)."""

_POD = Decoder(k8s_types.Pod)


class _Turn(NamedTuple):
    """The time for LISTs of a namespace. It ends at ``until`` (`time.monotonic`). ``timeout``: seconds for a page.

    ``exact``: the resourceVersion of the LISTs; empty for the newest.
    """

    kube: client.Kube
    namespace: str
    timeout: float
    until: float
    exact: str

    def pages(self, api: str, resource: str) -> Iterator[Page]:
        path = f"{api}/namespaces/{client.segment(self.namespace)}/{resource}"
        return self.kube.list_pages(path, timeout=self.timeout, seconds=self.until - time.monotonic(), exact=self.exact)


class ListedPods(NamedTuple):
    """The GPU pods of one namespace, from one LIST.

    ``version``: the resourceVersion of the LIST.
    ``charged``: the pods whose containers request GPU resources.
    ``claim_users``: the pods that use ResourceClaims. Such a pod may also be in ``charged``.
    """

    version: str
    charged: Sequence[StoredPod]
    claim_users: Sequence[ClaimUser]

    @property
    def uids(self) -> frozenset[str]:
        return frozenset([*(pod.uid for pod in self.charged), *(pod.uid for pod in self.claim_users)])


@dataclass(eq=False)
class NamespaceCounter:
    """Lists the pods and claims of a namespace, and counts their charges. `ListTurns` limits how many LISTs run.

    While too many other LISTs run, a LIST waits for at most ``timeout`` seconds. ``timeout`` is also the limit for one
    page. A method raises ListOverdue if its LIST cannot begin in time, or does not end in time.
    """

    kube: client.Kube
    nodes: Callable[[], Nodes]
    resources: Callable[[], GpuResources]
    claim_price: Callable[[], ClaimPrice | None]
    claim_reader: ClaimReader = field(default_factory=ClaimReader, init=False)
    _turns: ListTurns = field(default_factory=ListTurns, init=False)

    def count_pods(self, namespace: str, timeout: float = 10, exact: str = "") -> ObservedPods:
        """Return the charges of a namespace's pods and claims. Raises Unavailable if claims cannot be charged yet.

        ``exact``: the resourceVersion at which they are counted; empty for the newest.
        """
        return self._in_turn(namespace, self._count, timeout, exact)

    def count_claims(self, namespace: str, extended: Collection[str]) -> ObservedClaims | None:
        """Return the charges of a namespace's claims; None if the API server serves no claims.

        ``extended``: the names of claims to leave out, because their pods are charged instead.
        """
        return _count_claims(*self.priced_claims(namespace, extended))

    def priced_claims(self, namespace: str, extended: Collection[str]) -> tuple[str, PricedClaims]:
        """List a namespace's claims. Return a pair: the resourceVersion of the LIST, and the claims with their charges.

        ``extended``: the names of claims to leave out, because their pods are charged instead. The version is empty if
        the API server does not serve claims. Raises Unavailable if claims exist, but no devices have been read yet.
        """
        return self._in_turn(namespace, lambda turn: self._price(turn, extended))

    def stored_uids(self, namespace: str) -> frozenset[str]:
        pods, (_, claims) = self._in_turn(namespace, lambda turn: (self._pods(turn), self._claims(turn)))
        return pods.uids | {claim.uid for claim in claims}

    def list_pods(self, namespace: str) -> ListedPods:
        return self._in_turn(namespace, self._pods)

    def _in_turn(self, namespace: str, make: Callable[[_Turn], T], timeout: float = 10, exact: str = "") -> T:
        def take(seconds: float) -> T:
            return make(_Turn(self.kube, namespace, timeout, time.monotonic() + seconds, exact))

        return self._turns.run(namespace, take, timeout)

    def _count(self, turn: _Turn) -> ObservedPods:
        # Read the version of the quota ConfigMap before the pods. So no pod is charged by an older quota than this
        # version.
        config_version = self.resources().version
        listed, nodes = self._pods(turn), self.nodes()
        extended = charged_by_pods(listed.charged, nodes)
        # Pods are listed before claims, so the count contains each pod that is charged instead of its claim.
        claims = _count_claims(*self._price(turn, extended))
        return ObservedPods(
            listed.version,
            charges_by_model(charges_of(listed.charged, nodes)),
            listed.uids,
            since=listed.version,
            config_version=config_version,
            claims=claims,
            extended=extended,
            graces=long_graces((pod.model_on(nodes) or "", pod.grace_seconds) for pod in listed.charged if pod.live),
            claim_grace=long_grace(pod.grace_seconds for pod in listed.claim_users if pod.live),
        )

    def _price(self, turn: _Turn, extended: Collection[str]) -> tuple[str, PricedClaims]:
        version, stored = self._claims(turn)
        price = self.claim_price()
        if price is None and stored:
            raise errors.Unavailable("the cluster's devices have not been read yet, so claims cannot be charged")
        return version, [(each, price(each)) for each in stored if each.name not in extended] if price else []

    def _claims(self, turn: _Turn) -> tuple[str, list[StoredClaim]]:
        version = ""
        stored: list[StoredClaim] = []
        try:
            for page in turn.pages(API_PATH, "resourceclaims"):
                version = version or page.resource_version
                stored.extend(objects.decode_all(self.claim_reader.read, [page]))
        except errors.NotFound:
            return "", []
        return version, stored

    def _pods(self, turn: _Turn) -> ListedPods:
        version = ""
        charged: list[StoredPod] = []
        claim_users: list[ClaimUser] = []
        known = self.resources()
        for page in turn.pages("/api/v1", "pods"):
            version = version or page.resource_version
            for pod in objects.decode_all(_POD.decode, [page]):
                if stored := read_stored(pod, self.nodes().keys, known):
                    charged.append(stored)
                if user := read_claim_user(pod):
                    claim_users.append(user)
        return ListedPods(version, charged, claim_users)


def _count_claims(version: str, priced: PricedClaims) -> ObservedClaims | None:
    if not version:
        return None
    known = {claim.uid: taken.charges for claim, taken in priced if taken.charges}
    committed = charges_by_model(each for taken in known.values() for each in taken.items())
    users = {uid for claim, _ in priced for uid in claim.users}
    return ObservedClaims(version, committed, known.keys(), since=version, users=users)
