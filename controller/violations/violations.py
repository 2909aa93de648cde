"""Finds stored pods and claims that the current quota of their namespace would not admit.

Such pods and claims exist if the namespace was limited after their creation, if a limit was lowered, or if they were
created while the webhook was not called.
"""

import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from vcuda.allocations.given_cards import find_other_card
from vcuda.allocations.stored_claims import ClaimCharge, StoredClaim
from vcuda.allocations.stored_pods import StoredPod
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import NO_LIMIT, Charge, Limit, Mode, NamespaceQuota, cards, fits, mebibytes, total
from vcuda.quota.well_known import TOTAL

StoredObject = StoredPod | StoredClaim
PricedClaim = tuple[StoredClaim, ClaimCharge]

CLAIM_NOT_COUNTED_MESSAGE = (
    "the GPU quota of namespace {} does not count this claim, because the claim selects no GPU model and has no device "
    "of a known model. The claim was created before the quota was enforced, or while the webhook was not called. "
    "Recreate the claim to have it counted."
)


class ViolationKind(enum.StrEnum):
    """The kinds of violation: a pod without a GPU model, a forbidden model, too much usage, a card of another model."""

    UNPINNED = "unpinned"
    NOT_ALLOWED = "not-allowed"
    OVER_QUOTA = "over-quota"
    OTHER_MODEL = "other-model"


class Violation(msgspec.Struct, frozen=True):
    """A pod or a claim that the quota would not admit. ``message``: the reason.

    ``evictable``: True if the quota is enforced, and an eviction would lower the usage. A mirror pod is not
    evictable, because kubelet creates it again while its static pod runs. A claim is not evictable either, because
    the deletion of a claim in use releases nothing.
    """

    kind: ViolationKind
    stored: StoredObject
    message: str
    evictable: bool = False


class _Charged(NamedTuple):
    """A pod or a claim, and its charge for one GPU model."""

    stored: StoredObject
    charge: Charge


def find_violations(
    namespace: str, quota: NamespaceQuota, pods: Iterable[StoredPod], nodes: Nodes, claims: Iterable[PricedClaim] = ()
) -> Sequence[Violation]:
    """Return the most serious violation of each pod and claim of a namespace, the newest object first.

    The objects' charges are added up from the oldest to the newest, first for each model, and then for all models if
    the quota has `total`. An object that does not fit is a violation, and its charge is not added. So the added charges
    are within the limits. Finished pods and terminating objects are left out.
    An object within the limit is a violation if it was given a card of another model than its charge, or if it is a
    claim with a request that the webhook rejects.

    ``claims`` must not include claims that are already charged to their pod.
    """
    claims = tuple(claims)
    by_model: dict[str | None, list[_Charged]] = {}
    for model, charged in _charged(pods, nodes, claims):
        by_model.setdefault(model, []).append(charged)
    found: dict[str, Violation] = {}
    for model, held in by_model.items():
        limit = quota.limits.get(model) if model else None
        for violation in _violations(namespace, quota, model, limit, sorted(held, key=_age)):
            found.setdefault(violation.stored.uid, violation)
    if quota.total:
        every = sorted((each for model, held in by_model.items() if model for each in held), key=_age)
        # Objects that exceed the limit of their model are not added again, so that no more objects than needed exceed
        # `total`.
        found |= {
            each.stored.uid: each
            for each in _violations(namespace, quota, TOTAL, quota.total, every, left_out={*found})
        }
    for violation in (*_of_pods(by_model, nodes), *_of_claims(namespace, claims)):
        if not violation.stored.terminating:
            found.setdefault(violation.stored.uid, violation)
    return sorted(found.values(), key=_age, reverse=True)


def _charged(
    pods: Iterable[StoredPod], nodes: Nodes, claims: Iterable[PricedClaim]
) -> Iterator[tuple[str | None, _Charged]]:
    for pod in pods:
        if pod.live:
            yield pod.model_on(nodes) or pod.model, _Charged(pod, pod.charge_on(nodes))
    for claim, taken in claims:
        for model, charge in taken.charges.items():
            yield model, _Charged(claim, charge)


def _age(of: _Charged | Violation) -> tuple[str, str, str]:
    # Creation times (RFC 3339, UTC) sort as text. They have whole seconds, so objects of the same second sort by name.
    return of.stored.created, of.stored.name, of.stored.uid


def _violations(
    namespace: str,
    quota: NamespaceQuota,
    model: str | None,
    limit: Limit | None,
    held: Sequence[_Charged],
    *,
    left_out: Collection[str] = (),
) -> Iterator[Violation]:
    """Yield the violations in ``held``, the pods and claims of one GPU model, sorted from the oldest to the newest.

    ``model``, ``limit``: the model and its limit, or `TOTAL` and the limit of all models together.
    ``left_out``: the uids of objects that are not added.
    """
    # Leave out terminating pods. An evicted pod keeps its cards until it ends, and would cause a second eviction.
    staying = [each for each in held if not each.stored.terminating and each.stored.uid not in left_out]
    if model is None:
        message = f"the GPU quota of namespace {namespace} does not count this pod, because it has no GPU model"
        yield from (Violation(ViolationKind.UNPINNED, each.stored, message) for each in staying)
        return
    kind = ViolationKind.NOT_ALLOWED if limit is None else ViolationKind.OVER_QUOTA
    used = total(each.charge for each in held)
    allowed = ", ".join(quota.limits) or "none"
    not_allowed = f"namespace {namespace} may not use GPU model {model}; the models that it may use: {allowed}"
    for each in _beyond(limit or NO_LIMIT, staying):
        message = _over(namespace, model, limit, used, each) if limit else not_allowed
        evictable = quota.mode == Mode.ENFORCE and isinstance(each.stored, StoredPod)
        if isinstance(each.stored, StoredPod) and each.stored.mirror:
            advice = f"To end this mirror pod, remove the manifest of its static pod from node {each.stored.node}"
            message = f"{message}. {advice}."
            evictable = False
        yield Violation(kind, each.stored, message, evictable)


def _beyond(limit: Limit, held: Sequence[_Charged]) -> Iterator[_Charged]:
    used = Charge()
    for each in held:
        if fits(limit, used, each.charge):
            used += each.charge
        else:
            yield each


def _over(namespace: str, model: str, limit: Limit, used: Charge, beyond: _Charged) -> str:
    where, what = f"{model} in namespace {namespace}", "claim" if isinstance(beyond.stored, StoredClaim) else "pod"
    takes = cards(beyond.charge.cores)
    if limit.cores is not None and used.cores > limit.cores:
        figures = f"used: {cards(used.cores)}, limited: {cards(limit.cores)}"
    else:
        where = f"memory of {where}"
        takes = mebibytes(beyond.charge.memory_under(limit))
        figures = f"used: {mebibytes(used.memory_under(limit))}, limited: {mebibytes(limit.memory or 0)}"
    over = f"beyond GPU quota: {where}, {figures}"
    return f"{over}; this {what} takes {takes} and does not fit with the older pods and claims"


def _of_pods(by_model: Mapping[str | None, Iterable[_Charged]], nodes: Nodes) -> Iterator[Violation]:
    for pod in (stored for held in by_model.values() for stored, _ in held if isinstance(stored, StoredPod)):
        if other := find_other_card(pod, nodes):
            yield Violation(ViolationKind.OTHER_MODEL, pod, str(other))


def _of_claims(namespace: str, claims: Iterable[PricedClaim]) -> Iterator[Violation]:
    for claim, taken in claims:
        if taken.other:
            message = str(taken.other)
            # The claim is also charged for the model of its devices, because its status reliably names the devices.
            if taken.other.models:
                message = f"{message}; the claim is charged for both models"
            yield Violation(ViolationKind.OTHER_MODEL, claim, message)
        if taken.uncounted:
            message = f"{CLAIM_NOT_COUNTED_MESSAGE.format(namespace)} {taken.fault}".rstrip()
            yield Violation(ViolationKind.UNPINNED, claim, message)
        elif taken.fault:
            message = f"the GPU quota of namespace {namespace} would not admit this claim: {taken.fault}"
            yield Violation(ViolationKind.NOT_ALLOWED, claim, message)
