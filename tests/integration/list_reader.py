"""A program that reads one LIST with the code of vcuda quota, to measure the memory that a LIST needs.

It prints by how many MiB its peak memory grew, and how many objects it has kept.

Usage: python -m tests.integration.list_reader KUBECONFIG WHAT, where WHAT is a key of `READERS`
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from controller.claims import ClaimInformer
from controller.garbage.node.pods import list_pods
from controller.pods import PodInformer
from controller.retry.rejected import find_rejected, rejected_by_events
from controller.seen_events import CLAIM_REASON
from controller.ui.events import ReportedEvents
from tests.builders import LABELS
from tests.processes import memory
from vcuda.kube import Kube, LedgerStore, Reflector
from vcuda.placement.nodes import Nodes


def store(kube: Kube) -> LedgerStore:
    return LedgerStore(kube, "vcuda-quota", lambda: Nodes(LABELS))


def relisted(reflector: Reflector[Any]) -> int:
    reflector.relist()
    assert not reflector.counts.undecodable
    return len(reflector.snapshot())


def events(kube: Kube) -> int:
    found = ReportedEvents(kube)
    found.read()
    return len(found.current().rejections or ())


def claims(kube: Kube) -> ClaimInformer:
    return ClaimInformer(kube, store(kube), PodInformer(kube, LABELS, lambda _: None), lambda _: None)


READERS: Mapping[str, Callable[[Kube], int]] = {
    "a count of pods": lambda kube: len(store(kube).list_pods("team-a").uids),
    "a count of claims": lambda kube: len(store(kube).stored_uids("team-a")),
    "the watch of pods": lambda kube: relisted(PodInformer(kube, LABELS, lambda _: None).reflector),
    "the watch of claims": lambda kube: relisted(claims(kube).reflector),
    "the Events of the page": events,
    "Events of rejected pods": lambda kube: len(rejected_by_events(kube, "team-a", CLAIM_REASON, ("Pod",))),
    "rejected workloads": lambda kube: len(find_rejected(kube, "team-a").owners),
    "the pods of a node": lambda kube: len(list_pods(kube, "node-1").uids),
}


def main() -> None:
    kube = Kube.connect(Path(sys.argv[1]))
    # The peak is read from /proc, because getrusage() would count the peak of the parent process too.
    before = memory(os.getpid())
    read = READERS[sys.argv[2]](kube)
    print(memory(os.getpid()) - before, read)


if __name__ == "__main__":
    main()
