"""A name leads to its own object, whatever it is: a slash in one, of a flag too, makes no other path of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, cast

import pytest

from vcuda.errors import NotFound, VcudaError
from vcuda.kube import (
    Event,
    FreeCardsInformer,
    InvolvedObject,
    Kube,
    LedgerStore,
    QuotaInformer,
    QuotaPlace,
    post_event,
)
from vcuda.ledger.ledger import Ledger
from vcuda.placement.placement import Nodes

NAME = "team-a/../team-b"
QUOTED = "team-a%2F..%2Fteam-b"
IN_IT = f"/api/v1/namespaces/{QUOTED}/"


class Asked:
    """Notes which path each call is for, and knows nothing."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def get(self, path: str, *_: object, **__: object) -> NoReturn:
        """Answer any call."""
        self.paths.append(path)
        raise NotFound(404, "no such object")

    post = put = list_pages = get


def store(kube: Kube, namespace: str) -> LedgerStore:
    return LedgerStore(kube, namespace, Nodes)


@pytest.mark.parametrize(
    ("call", "begin"),
    [
        pytest.param(lambda kube: store(kube, NAME).write("a", Ledger(), None), IN_IT, id="the ledgers' namespace"),
        pytest.param(lambda kube: store(kube, "a").pods(NAME), IN_IT, id="a namespace's pods"),
        pytest.param(
            lambda kube: store(kube, "a").write(NAME, Ledger(), "1"),
            f"/api/v1/namespaces/a/configmaps/gpu-ledger-{QUOTED}",
            id="a namespace's ledger",
        ),
        pytest.param(lambda kube: FreeCardsInformer(kube, NAME).reflector.relist(), IN_IT, id="the published cards"),
        pytest.param(
            lambda kube: QuotaInformer(kube, QuotaPlace(NAME), frozenset()).stored_version(), IN_IT, id="the quota"
        ),
        pytest.param(
            lambda kube: post_event(
                kube, Event(InvolvedObject("v1", "Pod", "a", NAME), "id", "Reason", "message", "test")
            ),
            IN_IT,
            id="an Event",
        ),
    ],
)
def test_a_slash_in_a_name_is_part_of_the_name(call: Callable[[Kube], object], begin: str) -> None:
    asked = Asked()
    with pytest.raises(VcudaError, match="no such object"):
        call(cast("Kube", asked))
    assert asked.paths[0].startswith(begin)
