"""The free cards of each GPU model and pool (group of nodes). This project's scheduler extender publishes them."""

import operator
from collections.abc import Iterable, Mapping

import msgspec

from vcuda.quota.model import CORES_PER_CARD, Charge

CARDS_CONFIG_MAP = "gpu-cards"
CARDS_KEY = "cards.json"


class FreeCards(msgspec.Struct, frozen=True, gc=False):
    """The number of cards of one GPU model in one pool, and their free cores. Cores are hundredths of a card."""

    cards: int = 0
    """The number of all cards of one GPU model in one pool."""
    whole: int = 0
    """The number of cards that no pod uses."""
    free_cores: int = 0
    """The sum of the free cores of all cards of one GPU model in one pool."""
    fragmented_cores: int = 0
    """The sum of the free cores of partly used cards. A pod that requests whole cards cannot use these cores."""
    largest: int = 0
    """The most free cores on any single card. No container can get a larger share. Old extenders publish 0."""

    def __add__(self, other: "FreeCards") -> "FreeCards":
        *mine, largest = msgspec.structs.astuple(self)
        sums = map(operator.add, mine, msgspec.structs.astuple(other))
        return FreeCards(*[*sums, max(largest, other.largest)])

    def room_for(self, asked: Charge) -> int:
        """Return the free cores that a pod can use. A pod that requests whole cards can use only unused cards."""
        return self.whole * CORES_PER_CARD if asked.card_memory >= CORES_PER_CARD else self.free_cores


FreeCardsByPool = Mapping[tuple[str, str], FreeCards]
"""The free cards by GPU model and pool. The name of the pool is empty for nodes without a pool."""


class _PublishedCards(msgspec.Struct, frozen=True):
    model: str
    pool: str
    free: FreeCards


def free_by_model(published: FreeCardsByPool, pools: Iterable[str]) -> Mapping[str, FreeCards]:
    """Return the free cards of each model, added up over ``pools``. If ``pools`` is empty, all pools count."""
    allowed = frozenset(pools)
    found: dict[str, FreeCards] = {}
    for (model, pool), free in published.items():
        if not allowed or pool in allowed:
            found[model] = found.get(model, FreeCards()) + free
    return found


def write_free_cards(by_pool: FreeCardsByPool) -> str:
    """Return the free cards as text, in a fixed order, for the ConfigMap in which they are published."""
    rows = [_PublishedCards(model, pool, free) for (model, pool), free in sorted(by_pool.items())]
    return msgspec.json.format(msgspec.json.encode(rows), indent=2).decode()


def read_free_cards(text: str) -> FreeCardsByPool:
    """Parse a text that `write_free_cards` has written. Raises ValueError if the text is malformed."""
    return {(row.model, row.pool): row.free for row in msgspec.json.decode(text, type=list[_PublishedCards])}
