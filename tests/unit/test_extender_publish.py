"""What the leader's extender tells others: free cards to the webhook, and its address to a Service."""

from collections.abc import Mapping

import pytest

from controller.extender import publish
from controller.extender.publish import Advertiser, CardsPublisher
from tests.api_double import ApiDouble, Effect, Script, lost_request
from tests.builders import MODEL, POOL, nodes
from tests.extended import SYSTEM
from vcuda.allocations.cards import Cards, Share, Unplaceable
from vcuda.errors import VcudaError
from vcuda.placement.free_cards import FreeCards, read_free_cards
from vcuda.requests.schemes import GPU_MANAGER

CARDS = f"/api/v1/namespaces/{SYSTEM}/configmaps/gpu-cards"
SLICE = f"/apis/discovery.k8s.io/v1/namespaces/{SYSTEM}/endpointslices/vcuda-extender"
LABELS = {
    "kubernetes.io/service-name": "vcuda-extender",
    "endpointslice.kubernetes.io/managed-by": "vcuda-quota",
    "app.kubernetes.io/managed-by": "vcuda-quota",
}


def advertiser(api: ApiDouble, ip: str) -> Advertiser:
    return Advertiser(api.kube, SYSTEM, ip, 10443)


def led_to(api: ApiDouble) -> str:
    """The one address of the one slice that leads callers of the Service, which has to be as Kubernetes wants it."""
    assert [path for path in api.objects if "/endpointslices/" in path] == [SLICE]
    found = api.objects[SLICE]
    assert found["metadata"]["labels"].items() >= LABELS.items()
    assert found["ports"] == [{"name": "https", "port": 10443}]
    [endpoint] = found["endpoints"]
    assert endpoint["conditions"] == {"ready": True}
    [address] = endpoint["addresses"]
    assert found["addressType"] == ("IPv6" if ":" in address else "IPv4")
    return str(address)


@pytest.mark.parametrize(
    ("earlier", "later", "calls"),
    [
        pytest.param("10.0.0.1", "10.0.0.2", ["GET", "PATCH"], id="IPv4"),
        pytest.param("fd00::1", "fd00::2", ["GET", "PATCH"], id="IPv6"),
        pytest.param("10.0.0.1", "fd00::2", ["GET", "DELETE", "POST"], id="another family, which is immutable"),
    ],
)
def test_the_service_leads_to_whoever_holds_it_last(api: ApiDouble, earlier: str, later: str, calls: list[str]) -> None:
    """What an earlier leader wrote late is put right, and nothing is written in vain."""
    first, second = advertiser(api, earlier), advertiser(api, later)
    first.advertise()
    assert led_to(api) == earlier
    for _ in range(2):
        for wanted in (calls, ["GET"]):
            api.forget_calls()
            second.advertise()
            assert (led_to(api), api.calls) == (later, wanted)
        first.advertise()


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("text", ["another", None])
def test_a_slice_that_was_taken_away_leads_here_again(api: ApiDouble, label: str, text: str | None) -> None:
    advertiser(api, "10.0.0.1").advertise()
    api.store(SLICE, {**api.objects[SLICE], "metadata": {"labels": {**LABELS, label: text} if text else {}}})
    advertiser(api, "10.0.0.1").advertise()
    assert led_to(api) == "10.0.0.1"


def test_a_slice_that_another_deletes_first_is_made_anew(api: ApiDouble) -> None:
    """Between the look at one of another family and its deletion."""
    advertiser(api, "fd00::1").advertise()

    def between(method: str, _timeout: float, effect: Effect) -> bytes:
        if method == "DELETE":
            api.remove(SLICE)
        return effect()

    api.deliver = between
    advertiser(api, "10.0.0.1").advertise()
    assert led_to(api) == "10.0.0.1"


def test_a_slice_that_cannot_be_read_is_an_error(api: ApiDouble) -> None:
    api.deliver = Script(lost_request, methods=("GET",))
    with pytest.raises(VcudaError):
        advertiser(api, "10.0.0.1").advertise()


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


def test_figures_that_somebody_deletes_or_edits_are_back_after_a_while(api: ApiDouble) -> None:
    figures, seconds = {("M40", "public"): FreeCards(8, 8, 800)}, [0.0]
    publisher = CardsPublisher(api.kube, SYSTEM, lambda: figures, lambda: seconds[0])
    publisher.publish()
    api.remove(CARDS)
    for round_ in (1, 2):
        for seconds[0] in (round_ * publish.REPEAT_SECONDS - 1, round_ * publish.REPEAT_SECONDS):
            publisher.publish()
        assert published(api) == figures
        api.store(CARDS, {"metadata": {"name": "gpu-cards"}, "data": {"cards.json": "[]"}})


def test_figures_that_nobody_keeps_up_are_withdrawn(api: ApiDouble) -> None:
    publish.delete_published(api.kube, SYSTEM)
    CardsPublisher(api.kube, SYSTEM, dict).publish()
    api.deliver = Script(lost_request, methods=("DELETE",))
    for left in (True, False):
        publish.delete_published(api.kube, SYSTEM)
        assert (CARDS in api.objects) == left


def test_fragments_are_counted_by_model_and_pool() -> None:
    """A card in use has free cores that no pod for whole cards can have."""
    two = Cards.unused(GPU_MANAGER, 2, 128)
    known: dict[str, Cards | Unplaceable] = {
        "a": two.taken([Share(0, 30, 256)]),
        "b": two,
        "c": two.taken([Share(0, 100, 0), Share(1, 10, 256)]),
        "cpu": Unplaceable("no vcuda cards"),
        "unlabelled": two,
    }
    public = {MODEL: "M40", POOL: "public"}
    labelled = nodes(a=public, b=public, c={MODEL: "P100"}, cpu=public, unlabelled={})
    assert publish.count_free(known, labelled) == {
        ("M40", "public"): FreeCards(cards=4, whole=3, free_cores=370, fragmented_cores=70, largest=100),
        ("P100", ""): FreeCards(cards=2, whole=0, free_cores=90, fragmented_cores=90, largest=90),
    }
