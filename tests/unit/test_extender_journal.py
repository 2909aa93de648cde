"""Tests of the journals of placements, which are one ConfigMap per node."""

import json

import pytest

from controller.extender.journal import MAX_PLACEMENTS, Journal, JournalEntry, NodeJournal, name_of
from tests.api_double import ApiDouble
from tests.extended import JOURNAL, NO_CARD, SYSTEM, Leader, as_stored, gpu_node, journaled, pod_path, store_pod
from vcuda.allocations.cards import Share
from vcuda.errors import Conflict, NotPlaced, UnreadableJournal

ENTRY = JournalEntry("uid-1", "team-a", "train", {0: (Share(3, 30, 1024),), 2: (Share(0, 100, 0),)}, 7, "41")


@pytest.fixture
def journal(api: ApiDouble) -> Journal:
    return Journal(api.kube, SYSTEM)


def test_a_written_journal_is_read_back(journal: Journal) -> None:
    written = journal.write(NodeJournal("n1", "", {"uid-1": ENTRY}))
    assert journal.read("n1") == written
    assert [*journal.read_all()] == [written]
    assert [share.card for share in ENTRY.all_shares()] == [3, 0]


def test_only_a_write_with_the_newest_version_succeeds(api: ApiDouble, journal: Journal) -> None:
    first = journal.write(NodeJournal("n1", "", {"uid-1": ENTRY}))
    journal.write(first)
    for outdated in (first, NodeJournal("n1")):
        with pytest.raises(Conflict):
            journal.write(outdated)
    with pytest.raises(Conflict):
        journal.delete(first)
    assert JOURNAL in api.objects


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"node": 3}', '{"node": "n1", "placements": [{}]}'])
def test_a_damaged_journal_affects_only_its_node_until_it_is_deleted(api: ApiDouble, text: str | None) -> None:
    Leader(api, cards={"n1": 1, "n2": 1}).leads()
    damaged = {**api.objects[JOURNAL], "data": {"placements": text} if text is not None else None}
    api.store(JOURNAL, damaged)
    with pytest.raises(UnreadableJournal, match=r"Delete this ConfigMap\. The extender then creates it again"):
        Journal(api.kube, SYSTEM).read("n1")
    leader = Leader(api, cards={"n1": 1, "n2": 1}).leads()
    leader.place("train", "n2", 100)
    failed = leader.filter(store_pod(api, "next", 100), ["n1", "n2"])["FailedNodes"]
    assert failed == {"n1": "the placements on the node are not known yet", "n2": NO_CARD}
    api.remove(JOURNAL)
    assert leader.filter(as_stored(api, "next"), ["n1"])["NodeNames"] == ["n1"]


def test_a_deleted_journal_is_restored_from_memory(api: ApiDouble) -> None:
    leader = Leader(api).leads()
    leader.place("train", cores=100)
    api.remove(JOURNAL)
    leader.place("next", cores=100)
    assert {name: share[0].card for name, share in journaled(api)["n1"].items()} == {"train": 0, "next": 1}


def test_the_size_of_a_journal_is_bounded(api: ApiDouble, journal: Journal) -> None:
    """The largest journal of a node with eight cards is far below the API server's size limit."""
    entries = {f"{number:036}": ENTRY for number in range(MAX_PLACEMENTS + 1)}
    with pytest.raises(NotPlaced, match="node n1 already has the maximum of 1000 pods"):
        journal.write(NodeJournal("n1", "", entries))
    entries.popitem()
    journal.write(NodeJournal("n1", "", entries))
    assert len(json.dumps(api.objects[JOURNAL])) < 2**19


def test_the_journal_of_a_deleted_node_is_deleted_when_no_pod_uses_it(api: ApiDouble) -> None:
    leader = Leader(api).leads()
    leader.place("train")
    leader.cache.node_changed(gpu_node("n1", 2), None)
    leader.allocator.tidy()
    assert JOURNAL in api.objects
    before = as_stored(api, "train")
    api.remove(pod_path("train"))
    leader.sees("train", before)
    leader.allocator.tidy()
    assert JOURNAL not in api.objects


def test_every_node_has_a_valid_name_for_its_journal() -> None:
    long = ["x" * 253, "y" * 253]
    assert name_of("gpu-1.example.com") == "gpu-placements.gpu-1.example.com"
    assert len({name_of(node) for node in long}) == len(long)
    assert all(len(name_of(node)) <= 253 for node in long)
