"""Pods and claims that their namespace's quota would not let in as it is now: found, by what is stored.

They are there where a namespace was limited after they were created, where a limit was lowered, and where they were
created while the webhook was not asked.
"""

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from vcuda.allocations.given_cards import find_other_card
from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
from vcuda.allocations.stored_pods import StoredPod
from vcuda.ledger.ledger import NO_LIMIT
from vcuda.placement.placement import Nodes
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, cards, fits, mebibytes, total

Holder = StoredPod | StoredClaim
PricedClaim = tuple[StoredClaim, ClaimCharge]

CLAIM_NOT_COUNTED_MESSAGE = (
    "the GPU quota of namespace {} does not count this claim: it is held to no GPU model, and has no device of a model "
    "that is known; it was created before the quota was enforced, or while the webhook was away, so create it anew to "
    "have it counted"
)


class ViolationKind(enum.StrEnum):
    """What is wrong with it: no model to count it by, not allowed, over the limit, given another model's card."""

    UNPINNED = "unpinned"
    NOT_ALLOWED = "not-allowed"
    OVER_QUOTA = "over-quota"
    OTHER_MODEL = "other-model"


class Violation(msgspec.Struct, frozen=True):
    """A pod or a claim that the quota would not let in, and why.

    ``evictable``: a pod; the quota is enforced, and without it the namespace uses less. A mirror pod is not: its
    static pod runs on, and kubelet shows it anew, as the newest of all. Nor is a claim: as long as a pod uses it, its
    deletion frees nothing.
    """

    kind: ViolationKind
    holder: Holder
    message: str
    evictable: bool = False


class _Charged(NamedTuple):
    """What a pod or a claim takes of one model."""

    holder: Holder
    charge: Charge


def find_violations(
    namespace: str,
    quota: NamespaceQuota,
    pods: Iterable[StoredPod],
    nodes: Nodes,
    claims: Iterable[PricedClaim] = (),
) -> Sequence[Violation]:
    """Return what is wrong with a namespace's pods and claims, the newest first; of one the gravest.

    One is beyond the limit where it does not fit beside the older ones that do. So the newest go, without them the
    rest is within the limit, and each of them would be too much for it. Finished pods count for nothing. One that is
    terminating is never found, and leaves its place to the others already. Of those within the limit, whoever was given
    a card of another model than it is charged to is only told of, and so is a claim that asks in a way that is refused.
    Of the ``claims`` those are left out that pods are charged for.
    """
    claims = tuple(claims)
    by_model: dict[str | None, list[_Charged]] = {}
    for model, charged in _charged(pods, nodes, claims):
        by_model.setdefault(model, []).append(charged)
    found: dict[str, Violation] = {}
    for model, held in by_model.items():
        for violation in _violations(namespace, quota, model, sorted(held, key=_age)):
            found.setdefault(violation.holder.uid, violation)
    for violation in (*_of_pods(by_model, nodes), *_of_claims(namespace, claims)):
        if not violation.holder.terminating:
            found.setdefault(violation.holder.uid, violation)
    return sorted(found.values(), key=_age, reverse=True)


def _charged(
    pods: Iterable[StoredPod], nodes: Nodes, claims: Iterable[PricedClaim]
) -> Iterator[tuple[str | None, _Charged]]:
    for pod in pods:
        if pod.live:
            yield pod.model_on(nodes), _Charged(pod, pod.charge_on(nodes))
    for claim, taken in claims:
        for model, charge in taken.charges.items():
            yield model, _Charged(claim, charge)


def _age(of: _Charged | Violation) -> tuple[str, str, str]:
    # RFC 3339 in UTC, as the API server writes it, sorts as text, to the second; the name decides within one.
    return of.holder.created, of.holder.name, of.holder.uid


def _violations(
    namespace: str, quota: NamespaceQuota, model: str | None, held: Sequence[_Charged]
) -> Iterator[Violation]:
    """Yield what is wrong with those on one model, given oldest first."""
    # Were one that terminates in the way of others here, each eviction would take one more pod with it, as the one that
    # goes still holds its card.
    staying = [each for each in held if not each.holder.terminating]
    if model is None:
        message = f"the GPU quota of namespace {namespace} does not count it: it is held to no model and runs on none"
        yield from (Violation(ViolationKind.UNPINNED, each.holder, message) for each in staying)
        return
    limit = quota.limits.get(model)
    kind = ViolationKind.NOT_ALLOWED if limit is None else ViolationKind.OVER_QUOTA
    used = total(each.charge for each in held)
    allowed = ", ".join(quota.limits) or "none"
    not_allowed = f"namespace {namespace} may not use GPU model {model}; the models that it may use: {allowed}"
    for each in _beyond(limit or NO_LIMIT, staying):
        message = _over(namespace, model, limit, used, each) if limit else not_allowed
        evictable = quota.mode == Mode.ENFORCE and isinstance(each.holder, StoredPod)
        if isinstance(each.holder, StoredPod) and each.holder.mirror:
            message += f"; it shows a static pod, which only its manifest on node {each.holder.node} can end"
            evictable = False
        yield Violation(kind, each.holder, message, evictable)


def _beyond(limit: Limit, held: Sequence[_Charged]) -> Iterator[_Charged]:
    used = Charge()
    for each in held:
        if fits(limit, used, each.charge):
            used += each.charge
        else:
            yield each


def _over(namespace: str, model: str, limit: Limit, used: Charge, beyond: _Charged) -> str:
    where, what = f"{model} in namespace {namespace}", "claim" if isinstance(beyond.holder, StoredClaim) else "pod"
    takes = cards(beyond.charge.cores)
    figures = f"used: {cards(used.cores)}, limited: {cards(limit.cores)}"
    if used.cores <= limit.cores:
        where = f"memory of {where}"
        takes = mebibytes(beyond.charge.memory_under(limit))
        figures = f"used: {mebibytes(used.memory_under(limit))}, limited: {mebibytes(limit.memory or 0)}"
    return f"beyond GPU quota: {where}, {figures}; this {what} takes {takes} and does not fit beside the older ones"


def _of_pods(by_model: Mapping[str | None, Iterable[_Charged]], nodes: Nodes) -> Iterator[Violation]:
    for pod in (holder for held in by_model.values() for holder, _ in held if isinstance(holder, StoredPod)):
        if other := find_other_card(pod, nodes):
            yield Violation(ViolationKind.OTHER_MODEL, pod, str(other))


def _of_claims(namespace: str, claims: Iterable[PricedClaim]) -> Iterator[Violation]:
    for claim, taken in claims:
        if taken.other:
            # A claim's status, unlike a pod's annotations, is evidence.
            both = "; it counts for both" if taken.other.models else ""
            yield Violation(ViolationKind.OTHER_MODEL, claim, f"{taken.other}{both}")
        if taken.uncounted:
            fault = f"; {taken.fault}" if taken.fault else ""
            yield Violation(ViolationKind.UNPINNED, claim, f"{CLAIM_NOT_COUNTED_MESSAGE.format(namespace)}{fault}")
        elif taken.fault:
            message = f"the GPU quota of namespace {namespace} would not let it in: {taken.fault}"
            yield Violation(ViolationKind.NOT_ALLOWED, claim, message)
