"""The rules of the API server and of the replicas. Each ledger has parts, one for each of its namespaces."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tests.model.teams.world import (
    ARRIVING,
    ASKED,
    AWAY,
    ENDED,
    FLUSHED,
    FROZEN,
    LEDGERS,
    LINGERS,
    NAMESPACES,
    NEW,
    OPEN,
    RESERVED,
    STORED,
    SYNCED,
    WAITING,
    YES,
    Bounds,
    Ledger,
    Orphan,
    Part,
    Pod,
    Replica,
    World,
    Write,
    added,
    charged,
    parts_of,
    used_by,
)

Step = tuple[str, World]
"""A step of the model: a sentence, and the state (world) after the step."""

BACK = {FLUSHED: RESERVED, SYNCED: WAITING}
"""For each place of a pod that is part of a pending write: its place after the API server has rejected the write."""

RENEWED = 2
"""The time of a reservation that a wrong rule has renewed for a part that was frozen."""

LATE_RENEWAL = "a reservation is renewed for a frozen part"


def name(replica: int) -> str:
    return "AB"[replica]


def ledger_name(ledger: int) -> str:
    return "XY"[ledger]


def namespace_name(namespace: int) -> str:
    return "mn"[namespace]


def with_item(items: tuple[Any, ...], index: int, new: object) -> tuple[Any, ...]:
    return (*items[:index], new, *items[index + 1 :])


def with_pods(world: World, pods: Mapping[int, Pod], **others: Any) -> World:
    changed = tuple([_plain(pods.get(i, pod)) for i, pod in enumerate(world.pods)])
    return world._replace(pods=changed, **others)


def _plain(pod: Pod) -> Pod:
    """Return the pod without its replica and its ledger if these no longer matter."""
    return Pod(pod.stage) if pod.where == AWAY and pod.stage > YES else pod


def with_replica(world: World, replica: int, new: Replica, pods: Mapping[int, Pod] | None = None) -> World:
    return with_pods(world, pods or {}, replicas=with_item(world.replicas, replica, new))


def put(world: World, ledger: int, parts: Mapping[int, Part | None], *, swaps: bool = True) -> World:
    """Return the world (state) after a write of a ledger by compare-and-swap, which rejects its other pending writes.

    ``swaps``: False if the write wrongly rejects no other write.
    """
    stored = world.ledgers[ledger]
    new = Ledger(stored.up, tuple([parts.get(n, part) for n, part in enumerate(stored.parts)]))
    world = world._replace(ledgers=with_item(world.ledgers, ledger, new))
    return rejected(world, ledger) if swaps else world


def rejected(world: World, ledger: int) -> World:
    """Return the world (state) in which every pending write of this ledger is rejected."""
    if world.late and world.late.copy and world.late.ledger == ledger and not world.late.blind:
        world = world._replace(late=None)
    for r, replica in enumerate(world.replicas):
        if replica.write and not replica.write.landed and replica.write.ledger == ledger:
            pods = {
                i: pod._replace(where=BACK.get(pod.where, pod.where))
                for i, pod in enumerate(world.pods)
                if pod.replica == r
            }
            world = with_replica(world, r, replica._replace(write=None), pods)
    return world


def api_server(world: World, bounds: Bounds) -> Iterator[Step]:
    """A pod is stored only once, and only after its admission. Equal pods are requested in order."""
    asked: set[tuple[int, int]] = set()
    for i, pod in enumerate(world.pods):
        if pod.stage == NEW and bounds.pods[i] not in asked:
            asked.add(bounds.pods[i])
            for r in range(len(world.replicas)):
                yield f"p{i} is asked of {name(r)}", with_pods(world, {i: Pod(ASKED, WAITING, r)})
        if pod.stage == YES:
            yield f"p{i} is stored", with_pods(world, {i: pod._replace(stage=STORED)})
            yield f"p{i} can no longer be stored", with_pods(world, {i: pod._replace(stage=ENDED)})
        if pod.stage == STORED:
            yield f"p{i} is deleted", with_pods(world, {i: pod._replace(stage=ENDED)})
            if bounds.lingers:
                yield f"p{i} is deleted by force", with_pods(world, {i: pod._replace(stage=LINGERS)})
        if pod.stage == LINGERS:
            yield f"the containers of p{i} end", with_pods(world, {i: pod._replace(stage=ENDED)})


def learn(world: World, bounds: Bounds) -> Iterator[Step]:
    """A replica reads the next document. Reservations that it made by the older document admit nothing more."""
    for r, replica in enumerate(world.replicas):
        if bounds.learns and replica.document + 1 < len(bounds.documents) and replica.write is None:
            new = replica._replace(document=replica.document + 1, admitting=(0, 0))
            yield f"{name(r)} reads document {new.document}", with_replica(world, r, new)


def is_admitting(part: Part | None, replica: Replica, bounds: Bounds, ledger: int, namespace: int) -> bool:
    """ADMIT: return whether a replica may admit in a namespace's part of a ledger: open, and by no newer document."""
    if part is None or bounds.documents[replica.document].places[namespace] != ledger:
        return False
    return part.state == OPEN and part.document <= replica.document


def left(world: World, r: int, ledger: int, namespace: int, bounds: Bounds) -> int:
    """Return how much a replica may still admit from its reservation, whether its pending write is accepted or not."""
    replica = world.replicas[r]
    own = [pod for i, pod in enumerate(world.pods) if pod.replica == r and bounds.pods[i][0] == namespace]
    unwritten = sum(pod.where == RESERVED and pod.source == ledger for pod in own)
    flushed = sum(pod.where == FLUSHED and pod.source == ledger for pod in own)
    rest = replica.held[ledger][namespace] - unwritten - flushed
    if replica.write and replica.write.ledger == ledger:
        return min(rest, replica.write.reserve[namespace] - unwritten)
    return rest


def admit_from_reservation(world: World, bounds: Bounds) -> Iterator[Step]:
    """A replica admits a pod from its reservation without reading the ledger. Its namespace may be moving elsewhere."""
    for i, pod in enumerate(world.pods):
        namespace, model = bounds.pods[i]
        if pod.where != WAITING or model:
            continue
        replica = world.replicas[pod.replica]
        ledger = bounds.documents[replica.document].places[namespace]
        if replica.admitting[ledger] and left(world, pod.replica, ledger, namespace, bounds) > 0:
            admitted = pod._replace(stage=YES, where=RESERVED, source=ledger)
            yield f"{name(pod.replica)} admits p{i} from its reservation", with_pods(world, {i: admitted})


def is_gone(world: World, r: int, ledger: int, namespace: int, bounds: Bounds) -> bool:
    """Return whether the ledger shows that a replica's reservation was removed, or moves to another ledger."""
    part = world.ledgers[ledger].parts[namespace]
    if part and bounds.broken == LATE_RENEWAL and part.state == FROZEN:
        return False
    return world.replicas[r].held[ledger][namespace] > 0 and not (part and part.state == OPEN and part.reserved[r] > 0)


def forget(world: World, bounds: Bounds) -> Iterator[Step]:
    """A replica forgets a reservation that was removed, and the charges that it admitted from it.

    The pods stay charged: the reservation was copied, or the process that removed it has counted the stored pods.
    """
    for r, replica in enumerate(world.replicas):
        for ledger, namespace in itertools.product(LEDGERS, NAMESPACES):
            on_way = replica.write is not None and replica.write.ledger == ledger
            if not on_way and is_gone(world, r, ledger, namespace, bounds):
                held = with_item(replica.held[ledger], namespace, 0)
                pods = {
                    i: pod._replace(where=AWAY)
                    for i, pod in enumerate(world.pods)
                    if (pod.where, pod.replica, pod.source) == (RESERVED, r, ledger) and bounds.pods[i][0] == namespace
                }
                new = replica._replace(held=with_item(replica.held, ledger, held))
                where = f"{ledger_name(ledger)} of {namespace_name(namespace)}"
                yield f"{name(r)} finds its reservation in {where} gone", with_replica(world, r, new, pods)


def send(world: World, bounds: Bounds) -> Iterator[Step]:
    """A replica sends one write of a ledger, for all namespaces of the ledger.

    The write adds the pods that wait, makes charges admitted from reservations pending, and sets the next reservations.
    It is computed from the newest version of the ledger.
    """
    for r, replica in enumerate(world.replicas):
        for ledger in LEDGERS:
            gone = any(is_gone(world, r, ledger, each, bounds) for each in NAMESPACES)
            if replica.write is None and world.ledgers[ledger].up and not gone:
                yield from _writes(world, r, ledger, bounds)


def _writes(world: World, r: int, ledger: int, bounds: Bounds) -> Iterator[Step]:
    replica, parts = world.replicas[r], world.ledgers[ledger].parts
    admits = [is_admitting(part, replica, bounds, ledger, n) for n, part in enumerate(parts)]
    own = {i: pod for i, pod in enumerate(world.pods) if pod.replica == r}
    waiting = [i for i, pod in own.items() if pod.where == WAITING and admits[bounds.pods[i][0]]]
    unwritten = [i for i, pod in own.items() if pod.where == RESERVED and pod.source == ledger]
    held = replica.held[ledger]
    choices = [range(most + 1) if each else (0,) for each, most in zip(admits, bounds.reserve, strict=True)]
    for group in {(), *((each,) for each in waiting), tuple(waiting)}:
        for reserve in itertools.product(*choices):
            if not (group or unwritten or any(held) or any(reserve)):
                continue
            # A write that adds pods keeps the reservations, or reduces them by the charges admitted from them.
            less = tuple(held[n] - sum(bounds.pods[i][0] == n for i in unwritten) for n in NAMESPACES)
            if group and any(bounds.reserve) and reserve not in (held, less):
                continue
            if fits(world, Batch(r, ledger, group, tuple(unwritten), reserve), bounds):
                pods = {i: own[i]._replace(where=FLUSHED) for i in unwritten}
                pods |= {i: own[i]._replace(where=SYNCED, source=ledger) for i in group}
                sent = replica._replace(write=Write(ledger, reserve))
                words = f"{name(r)} writes {ledger_name(ledger)}: adds {list(group)}, flushes {unwritten}"
                yield f"{words}, reserves {list(reserve)}", with_replica(world, r, sent, pods)


class Batch(NamedTuple):
    """A write: the pods that it adds, the pods admitted from reservations before, and the next reservations."""

    replica: int
    ledger: int
    added: tuple[int, ...]
    flushed: tuple[int, ...]
    reserve: tuple[int, ...]


def fits(world: World, batch: Batch, bounds: Bounds) -> bool:
    """ADMIT: return whether a write fits the limits of each namespace, of the ledger, and of all models together.

    A write that does not raise the usage needs no room.
    """
    r, ledger, new, flushed, reserve = batch
    document = bounds.documents[world.replicas[r].document]
    sums, raised = (0, 0, 0), False
    for n, part in enumerate(world.ledgers[ledger].parts):
        if part is None:
            continue
        bits = sum(1 << i for i in (*new, *flushed) if bounds.pods[i][0] == n)
        # The replica's reservation in a namespace's frozen part of the ledger stays, whatever the replica writes.
        own = part.reserved[r] if part.state == OPEN else 0
        more = charged(bounds, bits & ~part.pending)
        change = more[0] + reserve[n] - own
        used = added(used_by(bounds, part), (change, more[1], change + more[1]))
        raises = change > 0 or more[1] > 0 or any(bounds.pods[i][0] == n for i in new)
        if raises and not is_within(used, document.namespaces[n], bounds, "the namespace"):
            return False
        raised |= raises
        sums = added(sums, _counted(used, part, bounds, own=n in {bounds.pods[i][0] for i in new}))
    return not raised or is_within(sums, document.ledgers[ledger], bounds, "the team")


def _counted(used: tuple[int, int, int], part: Part, bounds: Bounds, *, own: bool) -> tuple[int, int, int]:
    """Return the usage of a namespace's part of a ledger that counts for its team, in any state of the part."""
    if (part.state, bounds.broken) in ((FROZEN, "frozen parts do not count"), (ARRIVING, "copied parts do not count")):
        return 0, 0, 0
    if bounds.broken == "reservations of other parts do not count" and not own:
        reserved = sum(part.reserved)
        return used[0] - reserved, used[1], used[2] - reserved
    return used


def is_within(used: tuple[int, int, int], limits: tuple[int, int, int], bounds: Bounds, whose: str) -> bool:
    if bounds.broken == f"the limit of {whose} is not checked":
        return True
    total = used[2] <= limits[2] or bounds.broken == "the total is not checked"
    return used[0] <= limits[0] and used[1] <= limits[1] and total


def lands(world: World, bounds: Bounds) -> Iterator[Step]:
    """A replica's write is accepted. The replica may learn this later, after other writes."""
    for r, replica in enumerate(world.replicas):
        if not (write := replica.write):
            continue
        if not write.landed:
            bits = sum(
                1 << i for i, pod in enumerate(world.pods) if pod.replica == r and pod.where in (FLUSHED, SYNCED)
            )
            parts = {}
            for n, part in enumerate(world.ledgers[write.ledger].parts):
                if part and part.state == OPEN:
                    own = sum(1 << i for i in range(len(world.pods)) if bits >> i & 1 and bounds.pods[i][0] == n)
                    reserved = with_item(part.reserved, r, write.reserve[n])
                    parts[n] = part._replace(pending=part.pending | own, reserved=reserved)
            sent = with_replica(world, r, replica._replace(write=write._replace(landed=True)))
            yield f"the write of {name(r)} lands", put(sent, write.ledger, parts)
        else:
            yield f"the write of {name(r)} is confirmed", _confirmed(world, r, write, bounds)


def _confirmed(world: World, r: int, write: Write, bounds: Bounds) -> World:
    replica = world.replicas[r]
    pods = {}
    for i, pod in enumerate(world.pods):
        if pod.replica == r and pod.where in BACK:
            stage = YES if pod.where == SYNCED and pod.stage == ASKED else pod.stage
            pods[i] = pod._replace(stage=stage, where=AWAY)
    held, admits = write.reserve, int(any(write.reserve))
    if bounds.broken == LATE_RENEWAL:
        old = replica.held[write.ledger]
        kept = [bool(part and part.state == FROZEN) for part in world.ledgers[write.ledger].parts]
        held = tuple(old[n] if kept[n] else each for n, each in enumerate(held))
        admits = RENEWED if any(old[n] for n in NAMESPACES if kept[n]) else admits
    new = Replica(
        replica.document,
        with_item(replica.held, write.ledger, held),
        with_item(replica.admitting, write.ledger, admits),
    )
    return with_replica(world, r, new, pods)


def reservations_end(world: World, bounds: Bounds) -> Iterator[Step]:
    del bounds
    for r, replica in enumerate(world.replicas):
        for ledger, admits in enumerate(replica.admitting):
            if admits:
                over = replica._replace(admitting=with_item(replica.admitting, ledger, 0))
                yield f"the reservation time of {name(r)} in {ledger_name(ledger)} ends", with_replica(world, r, over)


def crash(world: World, bounds: Bounds) -> Iterator[Step]:
    """A replica crashes. Its new process has a new key, so no process renews the old reservations."""
    del bounds
    for r, replica in enumerate(world.replicas):
        if not world.crashes:
            return
        new, ledgers = world, list(world.ledgers)
        for ledger, namespace, part in parts_of(world):
            if part.state == OPEN and part.reserved[r]:
                orphans = tuple(sorted((*part.orphans, Orphan(part.reserved[r], r, ledger))))
                left_behind = part._replace(reserved=with_item(part.reserved, r, 0), orphans=orphans)
                each = ledgers[ledger]
                ledgers[ledger] = each._replace(parts=with_item(each.parts, namespace, left_behind))
        pods = {
            i: pod._replace(stage=ENDED if pod.stage == ASKED else pod.stage, where=AWAY)
            for i, pod in enumerate(world.pods)
            if pod.replica == r and pod.where != AWAY
        }
        fresh = Replica(replica.document, ((0, 0), (0, 0)), (0, 0))
        new = with_replica(new, r, fresh, pods)._replace(ledgers=tuple(ledgers), crashes=world.crashes - 1)
        yield f"{name(r)} crashes and starts again", new


RULES = (api_server, learn, admit_from_reservation, forget, send, lands, reservations_end, crash)
