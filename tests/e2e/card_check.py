"""Computes from annotations how much of each node's cards the stored pods use.

The tests of the scheduler extender compare its placements with these results, so this module shares no code with the
extender.
"""

from collections import Counter
from collections.abc import Iterable

from tests.e2e.cluster import Json

CORES, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"
INDEX = "tencent.com/predicate-gpu-idx-"

Taken = dict[tuple[str, int], tuple[int, int]]
"""By node and number of a card: the cores, and the blocks of memory (256 MiB each), that pods use on this card."""


def taken(pods: Iterable[Json], card_memory: int) -> Taken:
    """Return the use of each card. A pod counts until it has ended, if its spec or an annotation names a node."""
    cores: Counter[tuple[str, int]] = Counter()
    memory: Counter[tuple[str, int]] = Counter()
    for pod in pods:
        annotations = pod["metadata"].get("annotations", {})
        node = pod["spec"].get("nodeName") or annotations.get("tencent.com/predicate-node")
        if node is None or pod["status"]["phase"] in ("Succeeded", "Failed"):
            continue
        for number, container in enumerate(pod["spec"]["containers"]):
            asked, blocks = wanted(container)
            cards = [int(index) for index in annotations.get(f"{INDEX}{number}", "").split(",") if index]
            assert len(cards) == (max(1, asked // 100) if asked else 0), (pod["metadata"]["name"], cards, asked)
            for card in cards:
                cores[node, card] += min(asked, 100)
                memory[node, card] += card_memory if asked >= 100 else blocks
    return {key: (cores[key], memory[key]) for key in cores}


def wanted(container: Json) -> tuple[int, int]:
    limits = container.get("resources", {}).get("limits", {})
    return int(limits.get(CORES, 0)), int(limits.get(MEMORY, 0))


def over(used: Taken, nodes: Iterable[str], cards: int, card_memory: int) -> list[str]:
    """Return a text for each card with too many allocated cores or MiB, and for each used card that does not exist."""
    known = {(node, card) for node in nodes for card in range(cards)}
    return [
        f"{node} card {card}: {cores} cores, {memory} blocks"
        for (node, card), (cores, memory) in sorted(used.items())
        if cores > 100 or memory > card_memory or (node, card) not in known
    ]


def fits_somewhere(pod: Json, used: Taken, nodes: Iterable[str], cards: int, card_memory: int) -> bool:
    """Return True if the pod fits on a node. Each container gets the fullest card that has room for it."""
    return any(_fits(pod, [used.get((node, card), (0, 0)) for card in range(cards)], card_memory) for node in nodes)


def _fits(pod: Json, node: list[tuple[int, int]], card_memory: int) -> bool:
    for container in pod["spec"]["containers"]:
        cores, memory = wanted(container)
        if cores >= 100:
            whole = [card for card, used in enumerate(node) if used == (0, 0)][: cores // 100]
            if len(whole) < cores // 100:
                return False
            for card in whole:
                node[card] = (100, card_memory)
        elif cores:
            room = [
                (-used[0], -used[1], card)
                for card, used in enumerate(node)
                if used[0] + cores <= 100 and used[1] + memory <= card_memory
            ]
            if not room:
                return False
            card = min(room)[2]
            node[card] = (node[card][0] + cores, node[card][1] + memory)
    return True
