"""Tests of the report of free cards. The leader's extender publishes it for the webhook."""

from collections.abc import Mapping

from controller.extender import publish
from controller.extender.publish import CardsPublisher
from tests.api_double import ApiDouble, Script, lost_request
from tests.builders import MODEL, POOL, nodes
from tests.extended import SYSTEM
from vcuda.allocations.cards import Cards, Share, Unplaceable
from vcuda.placement.free_cards import FreeCards, read_free_cards
from vcuda.requests.schemes import GPU_MANAGER

CARDS = f"/api/v1/namespaces/{SYSTEM}/configmaps/gpu-cards"


def published(api: ApiDouble) -> Mapping[tuple[str, str], FreeCards]:
    return read_free_cards(api.objects[CARDS]["data"]["cards.json"])


def test_free_cards_are_published_when_they_change(api: ApiDouble) -> None:
    figures = {("M40", "public"): FreeCards(8, 8, 800)}
    publisher = CardsPublisher(api.kube, SYSTEM, lambda: figures)
    publisher.publish()
    api.forget_calls()
    publisher.publish()
    assert api.calls == []
    figures["M40", "public"] = FreeCards(8, 7, 730, 30)
    publisher.publish()
    assert published(api) == figures


def test_deleted_or_edited_figures_are_restored_after_a_while(api: ApiDouble) -> None:
    figures, seconds = {("M40", "public"): FreeCards(8, 8, 800)}, [0.0]
    publisher = CardsPublisher(api.kube, SYSTEM, lambda: figures, lambda: seconds[0])
    publisher.publish()
    api.remove(CARDS)
    for round_ in (1, 2):
        for seconds[0] in (round_ * publish.REPEAT_SECONDS - 1, round_ * publish.REPEAT_SECONDS):
            publisher.publish()
        assert published(api) == figures
        api.store(CARDS, {"metadata": {"name": "gpu-cards"}, "data": {"cards.json": "[]"}})


def test_figures_that_are_no_longer_updated_are_withdrawn(api: ApiDouble) -> None:
    publish.delete_published(api.kube, SYSTEM)
    CardsPublisher(api.kube, SYSTEM, dict).publish()
    api.deliver = Script(lost_request, methods=("DELETE",))
    for left in (True, False):
        publish.delete_published(api.kube, SYSTEM)
        assert (CARDS in api.objects) == left


def test_fragments_are_counted_by_model_and_pool() -> None:
    """A fragment is the free part of a card that is in use. Pods that request whole cards cannot use fragments."""
    two = Cards.unused(GPU_MANAGER, 2, 128)
    known: dict[str, Cards | Unplaceable] = {
        "a": two.taken([Share(0, 30, 256)]),
        "b": two,
        "c": two.taken([Share(0, 100, 0), Share(1, 10, 256)]),
        "cpu": Unplaceable("the node has no vcuda cards"),
        "unlabelled": two,
    }
    public = {MODEL: "M40", POOL: "public"}
    labelled = nodes(a=public, b=public, c={MODEL: "P100"}, cpu=public, unlabelled={})
    assert publish.count_free(known, labelled) == {
        ("M40", "public"): FreeCards(cards=4, whole=3, free_cores=370, fragmented_cores=70, largest=100),
        ("P100", ""): FreeCards(cards=2, whole=0, free_cores=90, fragmented_cores=90, largest=90),
    }
