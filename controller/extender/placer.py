"""Decides where a pod goes and writes it on the pod, so that no share is ever given twice.

All placements are made one after the other: each is decided from a book that holds the ones before it, whether the
watch has shown them or not, and is answered only when its patch is known to have landed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec
import structlog

from controller.extender.book import Promise
from controller.extender.deadline import Deadline
from controller.extender.desk import TIMEOUT, TRIES, Desk, path_of
from controller.extender.metrics import ExtenderMetrics
from vcuda.allocate import Choice, Known, Order, Placement, allot, packed
from vcuda.cards import Cards, Reason
from vcuda.demands import Wish, read_wish
from vcuda.errors import ApiError, Conflict, NotPlaced, Unreachable, VcudaError
from vcuda.extender import Candidates, Preemption, Victims
from vcuda.kube import MERGE_PATCH
from vcuda.objects import UNDECODABLE, Pod
from vcuda.records import Holding, annotations_for, patch_of, read_holding

_POD = msgspec.json.Decoder(Pod)


class Placer:
    """The extender's decisions. ``now`` is Unix time in nanoseconds; ``clock`` is in seconds, and only runs forward."""

    def __init__(
        self,
        desk: Desk,
        metrics: ExtenderMetrics,
        *,
        order: Order = packed,
        now: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = desk
        self._book = desk.book
        self._metrics = metrics
        self._order = order
        self._now = now
        self._clock = clock
        self._unshown: frozenset[Promise] = frozenset()
        self._log = structlog.get_logger()

    def filter(self, candidates: Candidates) -> bytes:
        """Place the pod on one of the nodes, and return the ExtenderFilterResult that says so.

        A pod that wants no card by number passes everywhere. Where nothing could be decided the answer is an error, on
        which the scheduler tries the pod again.
        """
        deadline = Deadline(self._clock)
        wish = read_wish(candidates.pod)
        if wish is None:
            return candidates.passing(candidates.names)
        if isinstance(wish, Reason):
            return candidates.failing(dict.fromkeys(candidates.names, wish))
        try:
            with self._desk.turn():
                choice = self._place(candidates.pod, wish, candidates.names, deadline)
        except VcudaError as error:
            self._metrics.count("error")
            self._log.warning("not placed", pod=_name(candidates.pod), error=str(error))
            return candidates.failed(str(error))
        if isinstance(choice, Placement):
            self._metrics.count("placed")
            return candidates.passing([choice.node])
        self._metrics.count("unplaceable")
        return candidates.failing(choice)

    def preempt(self, preemption: Preemption) -> dict[str, Victims]:
        """Return the nodes on which the pod would fit on cards once its victims are gone.

        The scheduler has chosen them by sums alone. Where they do not make room on any one card, nobody is evicted.
        """
        wish = read_wish(preemption.pod)
        if wish is None:
            return dict(preemption.victims)
        return {
            node: victims
            for node, victims in preemption.victims.items()
            if isinstance(wish, Wish) and self._would_fit(preemption.pod, wish, node, victims)
        }

    def scores(self, candidates: Candidates) -> dict[str, int]:
        """Return 10 for a node without cards and 0 for one with, as gpu-admission: other pods leave cards to those.

        A vcuda pod has one node left when it gets here.
        """
        cards = self._book.cards()
        return {name: 0 if isinstance(cards.get(name), Cards) else 10 for name in candidates.names}

    def look_for_the_gone(self) -> None:
        """Read the pods that were promised shares, and that the watch has not shown since the last look.

        One that came and went while nobody watched is never reported: its shares would be nobody's. That a pod cannot
        be read now is no fault; there will be another look.
        """
        promises = frozenset(self._book.promises())
        for promise in promises & self._unshown:
            try:
                self._desk.read(promise)
            except (VcudaError, *UNDECODABLE) as error:
                self._log.info("promised shares to a pod that is not to be had", pod=promise.name, error=str(error))
        self._unshown = promises

    def _would_fit(self, pod: Pod, wish: Wish, node: str, victims: Victims) -> bool:
        cards = self._book.without_all(node, (*victims.uids, pod.metadata.uid))
        return (
            isinstance(cards, Cards)
            and cards.scheme is wish.scheme
            and not isinstance(allot(cards, wish.demands), Reason)
        )

    def _place(self, pod: Pod, wish: Wish, names: Iterable[str], deadline: Deadline) -> Choice:
        for _ in range(TRIES):
            if pod.spec.node_name:
                raise NotPlaced(f"the pod is bound to {pod.spec.node_name} already")
            known = self._book.without(pod.metadata.uid)
            choice = self._choose(pod, wish, names, known)
            if not isinstance(choice, Placement):
                return choice
            fresh = self._write(pod, wish, choice, deadline)
            if fresh is None:
                return choice
            pod = fresh
        raise NotPlaced("the pod changes too often")

    def _choose(self, pod: Pod, wish: Wish, names: Iterable[str], known: Known) -> Choice:
        """Choose the node of an earlier placement, if there is one and the pod still fits there, else any.

        On that node the cards are chosen anew: gpu-manager takes the fullest that fits when the container starts, and
        refuses a share whose annotation names another.
        """
        names = tuple(names)
        before = read_holding(pod)
        if before is not None and before.node in names:
            choice = self._order(wish, (before.node,), known)
            if isinstance(choice, Placement):
                return choice
        return self._order(wish, names, known)

    def _write(self, pod: Pod, wish: Wish, choice: Placement, deadline: Deadline) -> Pod | None:
        """Write the placement; return None once it is known to have landed, else the pod as it is now, to try again."""
        metadata = pod.metadata
        holding = Holding(choice.node, choice.allotment.all_shares())
        promise = Promise(metadata.uid, metadata.namespace, metadata.name, metadata.resource_version, holding)
        written = annotations_for(wish.scheme, choice.node, choice.allotment.shares, self._now())
        timeout = self._desk.announce(promise, deadline)
        patch = patch_of(written, pod.annotations, metadata.uid, metadata.resource_version)
        try:
            answer = self._desk.kube.patch(path_of(promise), patch, MERGE_PATCH, timeout=timeout)
        except Conflict:
            self._book.withdraw(promise)
            return self._desk.read(promise, deadline.within(TIMEOUT))
        except ApiError as error:
            self._book.withdraw(promise)
            raise NotPlaced(f"the pod's annotations cannot be written: {error}") from error
        except Unreachable as error:
            return self._after_unknown(promise, written, error, deadline)
        self._book.keep(promise, _POD.decode(answer).metadata.resource_version)
        return None

    def _after_unknown(
        self, promise: Promise, written: dict[str, str], error: Unreachable, deadline: Deadline
    ) -> Pod | None:
        """Find out what came of a patch that was not answered. While it may land still its shares stay taken."""
        pod = self._desk.read(promise, deadline.within(TIMEOUT))
        if written.items() <= pod.annotations.items():
            self._book.keep(promise, pod.metadata.resource_version)
            return None
        if pod.metadata.resource_version == promise.base:
            raise NotPlaced(f"whether the pod's annotations were written is not known: {error}") from error
        self._book.withdraw(promise)
        return pod


def _name(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
