"""The rules LOWER and OPEN, and the steps of pods, losses and edits. Any process may follow these rules."""

from collections.abc import Iterator

from tests.model.teams.raising import (
    ENDED,
    Step,
    begin,
    is_newer,
    joined,
    name,
    put,
    put_team,
    still_brought,
    team_name,
    without,
)
from tests.model.teams.world import (
    MODELS,
    NAMESPACES,
    NONE,
    NOTHING,
    UNSEEN,
    Allotment,
    Amount,
    Bounds,
    Ledger,
    Procedure,
    TeamLedger,
    World,
    covers,
    documents,
    largest,
    less,
    one,
    plus,
    smallest,
    with_item,
)


def lowered(ledger: Ledger, team: int, bounds: Bounds, *, opens: bool = False) -> Ledger:
    """Return the ledger with an allotment of at most its usage. Its version changes, even if nothing else does.

    ``opens``: for an OPEN, after which the next admission must look at the team ledger.
    """
    own = ledger.allotments[team]
    assert own
    new = Allotment(smallest(own.charges, ledger.used), NONE if opens else own.terms)
    if bounds.broken == "a lowering raises":
        new = Allotment(ledger.used, new.terms)
    if bounds.broken == KEPT_TERMS and opens:
        new = own
    return ledger._replace(allotments=with_item(ledger.allotments, team, new))


KEPT_TERMS = "an opening keeps the terms"
NOT_COVERED = "a joined ledger gives back what is not covered"


def begin_lower(world: World, bounds: Bounds) -> Iterator[Step]:
    """LOWER, first step: read the team ledger."""
    for team, here in enumerate(world.teams):
        for number in documents(world) if here and not here.closed and bounds.broken != "nothing is lowered" else ():
            new = Procedure("LOWER", NONE, team, number)
            assert here
            if number >= here.document and any(is_lowerable(world, bounds, new, n) for n in NAMESPACES):
                yield from begin(world, bounds, new)


def lower(world: World, bounds: Bounds) -> Iterator[Step]:
    """LOWER: write the ledgers of namespaces, then write the team ledger at the version that was read before them."""
    for each in world.procedures:
        here = world.teams[each.team]
        if each.kind != "LOWER" or here is None:
            continue
        for n in NAMESPACES:
            if each.seen[n] == UNSEEN and is_lowerable(world, bounds, each, n):
                yield f"{name(n)} gives back in {team_name(each.team)}", lower_ledger(world, bounds, each, n)
        if each.seen != (UNSEEN, UNSEEN):
            allotted = tuple([a if s == UNSEEN else s for a, s in zip(here.allotted, each.seen, strict=True)])
            new_here = here._replace(allotted=allotted)
            after = put_team(
                world, each.team, new_here, member=members(world, bounds, each), procedures=without(world, each)
            )
            yield f"{team_name(each.team)} takes back: {list(allotted)}", after


def is_lowerable(world: World, bounds: Bounds, procedure: Procedure, namespace: int) -> bool:
    """Return whether a LOWER can take back a part of an allotment of this namespace.

    A lost ledger keeps its allotment, and so does a ledger that has not yet joined its team again.
    """
    here, ledger, team = world.teams[procedure.team], world.ledgers[namespace], procedure.team
    amount = here.allotted[namespace] if here else None
    if amount is None:
        return False
    elsewhere = bounds.documents[procedure.document].places[namespace] != team
    elsewhere = elsewhere or (bounds.broken == ENDED and world.gone[namespace])
    if ledger is None:
        ended = world.gone[namespace] and not world.marks[namespace]
        return elsewhere or ended or bounds.broken == "a missing ledger gives back"
    if own := ledger.allotments[team]:
        used = own.charges if bounds.broken == NOT_COVERED else ledger.used
        unused = not covers(used, amount) or not covers(used, own.charges)
        return (ledger.open or bounds.broken == "a closed ledger gives back") and unused
    return elsewhere or bounds.broken == "every ledger without the team gives back"


def lower_ledger(world: World, bounds: Bounds, procedure: Procedure, namespace: int) -> World:
    here, ledger = world.teams[procedure.team], world.ledgers[namespace]
    amount: Amount | None = None
    if here and ledger and (own := ledger.allotments[procedure.team]):
        new = lowered(ledger, procedure.team, bounds)
        used = smallest(own.charges, ledger.used) if bounds.broken == NOT_COVERED else ledger.used
        amount = smallest(here.allotted[namespace] or NOTHING, used)
        silent = bounds.broken == "an unchanged ledger is not written" and new == ledger
        if not silent and bounds.broken != "the ledger is not written":
            world = put(world, namespace, new)
    return noted(world, procedure, namespace, amount)


def noted(world: World, procedure: Procedure, namespace: int, amount: Amount | None) -> World:
    """Return the world (state) in which a LOWER or OPEN has seen what it will allot to a namespace."""
    seen = procedure._replace(seen=with_item(procedure.seen, namespace, amount if amount != NOTHING else None))
    return world._replace(procedures=tuple([seen if each == procedure else each for each in world.procedures]))


def members(world: World, bounds: Bounds, procedure: Procedure) -> tuple[int, ...]:
    """Return the teams that count the namespaces. A namespace leaves a team if a document has it elsewhere."""
    places, found = bounds.documents[procedure.document].places, list(world.member)
    for n in NAMESPACES:
        if found[n] == procedure.team != places[n] and procedure.seen[n] is None:
            found[n] = NONE
    return tuple(found)


def begin_update(world: World, bounds: Bounds) -> Iterator[Step]:
    """NEW MEMBERS, first step: read an open team ledger that an older document has written."""
    for team, here in enumerate(world.teams):
        for number in documents(world) if here and not here.closed else ():
            assert here
            if number > here.document:
                yield from begin(world, bounds, Procedure("UPDATE", NONE, team, number))


def update(world: World, bounds: Bounds) -> Iterator[Step]:
    """NEW MEMBERS: join the namespaces that the document names. If one brings charges, close the team ledger."""
    for each in world.procedures:
        here = world.teams[each.team]
        if each.kind != "UPDATE" or here is None:
            continue
        for n in NAMESPACES:
            if each.seen[n] == UNSEEN:
                ledger = looked_up(world, bounds, each, n)
                after = put(world, n, ledger) if ledger != world.ledgers[n] else world
                brings = is_joining(ledger, each.team) and not covers(
                    here.allotted[n], ledger.used if ledger else NOTHING
                )
                words = f"{name(n)} is looked up for {team_name(each.team)}"
                yield words, noted(after, each, n, one(0) if brings else None)
        if UNSEEN not in each.seen:
            closes = each.seen != (None, None)
            new, left = here._replace(closed=closes, document=each.document), without(world, each)
            counted = world if closes else counting(world, bounds, each, here.allotted)
            words = f"{team_name(each.team)} is {'closed' if closes else 'written'} by document {each.document}"
            yield words, put_team(counted, each.team, new, procedures=left)


def looked_up(world: World, bounds: Bounds, procedure: Procedure, namespace: int) -> Ledger | None:
    """Return the ledger of a namespace, which joins the team if the document names it."""
    ledger, team, number = world.ledgers[namespace], procedure.team, procedure.document
    placed = bounds.documents[number].places[namespace] == team
    if ledger and ledger.open and placed and team not in ledger.names and is_newer(ledger, number, bounds):
        return joined(ledger, team, number)
    return ledger


def is_joining(ledger: Ledger | None, team: int) -> bool:
    own = ledger.allotments[team] if ledger else None
    return bool(ledger and own) and (len(ledger.names) > 1 or own.charges == NOTHING)  # type: ignore[union-attr]


def counting(world: World, bounds: Bounds, procedure: Procedure, allotted: tuple[Amount | None, ...]) -> World:
    """Return the world (state) in which the team counts each namespace that it names and that has an open ledger."""
    for n in NAMESPACES:
        ledger, placed = world.ledgers[n], bounds.documents[procedure.document].places[n] == procedure.team
        if ledger and ledger.open and placed and procedure.team in ledger.names and world.member[n] != procedure.team:
            known = smallest(allotted[n] or NOTHING, ledger.used)
            brought = with_item(world.brought, n, less(world.held[n], known))
            world = world._replace(member=with_item(world.member, n, procedure.team), brought=brought)
    return world


def begin_open(world: World, bounds: Bounds) -> Iterator[Step]:
    """OPEN, first step: read the closed team ledger. A new team ledger is closed."""
    for team, here in enumerate(world.teams):
        if here is None:
            new = TeamLedger(closed=bounds.broken != "a new team ledger is open")
            yield f"{team_name(team)} is made", put_team(world, team, new)
        elif here.closed:
            for number in documents(world):
                if number >= here.document:
                    yield from begin(world, bounds, Procedure("OPEN", NONE, team, number))


def open_team(world: World, bounds: Bounds) -> Iterator[Step]:
    """OPEN: write each ledger that names the team, or that joins it now. Then open the team ledger."""
    for each in world.procedures:
        if each.kind != "OPEN":
            continue
        for n in NAMESPACES:
            if each.seen[n] == UNSEEN:
                yield from visit(world, bounds, each, n)
        if UNSEEN not in each.seen:
            yield f"{team_name(each.team)} is opened: {list(each.seen)}", opened(world, bounds, each)


def visit(world: World, bounds: Bounds, procedure: Procedure, namespace: int) -> Iterator[Step]:
    """Read a namespace's ledger for an OPEN. If the ledger names the team, or joins it, write it too.

    If the ledger is lost, the team ledger must know its allotment. Otherwise the OPEN waits for the ledger.
    """
    ledger, team, here = world.ledgers[namespace], procedure.team, world.teams[procedure.team]
    placed = bounds.documents[procedure.document].places[namespace] == team
    if bounds.broken == "an opening joins no ledger":
        placed = False
    if ledger and placed and team not in ledger.names and is_newer(ledger, procedure.document, bounds):
        ledger = joined(ledger, team, procedure.document)
    own = ledger.allotments[team] if ledger else None
    amount = ledger.used if ledger and own else None
    if ledger and own and bounds.broken != "an opening writes no ledger":
        world = put(world, namespace, lowered(ledger, team, bounds, opens=True))
    if own and bounds.broken == KEPT_TERMS:
        amount = largest(amount or NOTHING, own.charges)
    if not (ledger and ledger.open) and (placed or own):
        amount = here.allotted[namespace] if here else None
        waits = amount is None and world.marks[namespace]
        if waits and bounds.broken != "an opening waits for no ledger":
            return
    yield f"{name(namespace)} is visited for {team_name(team)}", noted(world, procedure, namespace, amount)


def opened(world: World, bounds: Bounds, procedure: Procedure) -> World:
    here = world.teams[procedure.team]
    world = counting(world, bounds, procedure, procedure.seen)
    brought = world.brought
    for n, amount in enumerate(procedure.seen):
        # A pod that the namespace's ledger does not count yet is not in the amount.
        if (ledger := world.ledgers[n]) and world.member[n] == procedure.team:
            known = smallest(amount or NOTHING, ledger.used)
            brought = still_brought(world._replace(brought=brought), n, known)
    new = TeamLedger(procedure.seen, document=max(here.document if here else NONE, procedure.document))
    left, counted = without(world, procedure), members(world, bounds, procedure)
    return put_team(world, procedure.team, new, member=counted, brought=brought, procedures=left)


def pods(world: World, bounds: Bounds) -> Iterator[Step]:
    """Pods end, or start to run without an admission. A recount finds both later."""
    for n, model in [(n, model) for n in NAMESPACES for model in MODELS[: bounds.models]]:
        held, brought = world.held[n], world.brought[n]
        if held[model]:
            ended = world._replace(held=with_item(world.held, n, less(held, one(model))))
            yield (
                f"a pod of {name(n)} ends",
                ended._replace(brought=with_item(ended.brought, n, less(brought, one(model)))),
            )
        if world.brings and not world.gone[n]:
            held, brought = plus(held, one(model)), plus(brought, one(model))
            new = world._replace(held=with_item(world.held, n, held), brought=with_item(world.brought, n, brought))
            yield f"a pod of {name(n)} was not admitted", new._replace(brings=world.brings - 1)


def missing_ledgers(world: World, bounds: Bounds) -> Iterator[Step]:
    """A process makes a missing ledger of a namespace, which is closed. An ended namespace gets one if it had one."""
    for n, ledger in enumerate(world.ledgers):
        if world.gone[n] and world.ends:
            yield f"{name(n)} is made again", world._replace(gone=with_item(world.gone, n, False))
        if ledger is not None:
            continue
        idle = bounds.broken == "no lost ledger is made" and world.held[n] == NOTHING
        if (not world.gone[n] or world.marks[n]) and not idle:
            yield f"a ledger of {name(n)} is made", put(world, n, Ledger(open=False))


def ledgers(world: World, bounds: Bounds) -> Iterator[Step]:
    """RECOUNT, LOST and END of the ledgers of namespaces. None of these steps reads or writes a team ledger."""
    del bounds
    for n, ledger in enumerate(world.ledgers):
        held, marks = world.held[n], world.marks
        if ledger is None:
            continue
        if not ledger.open:
            # After the wait, each pod that may have been admitted is stored, or can no longer be stored.
            opens = put(world, n, ledger._replace(used=held, open=True))
            yield f"the ledger of {name(n)} is opened", opens._replace(marks=with_item(marks, n, True))
        elif ledger.used != held:
            yield f"{name(n)} is recounted", put(world, n, ledger._replace(used=held))
        if world.losses:
            yield f"the ledger of {name(n)} is lost", put(world, n, None)._replace(losses=world.losses - 1)
        gone = world.gone[n]
        if world.ends and not gone:
            # Its pods may still run. A process may also see the namespace late.
            yield f"{name(n)} ends", world._replace(ends=world.ends - 1, gone=with_item(world.gone, n, True))
        if ledger.open and ledger.used == held and (held == NOTHING if gone else world.ends):
            member, brought = with_item(world.member, n, NONE), with_item(world.brought, n, NOTHING)
            deleted = put(world, n, None, ends=world.ends - (not gone), member=member, brought=brought)
            yield f"the ledger of {name(n)} is deleted", deleted._replace(marks=with_item(marks, n, False))


def edits(world: World, bounds: Bounds) -> Iterator[Step]:
    """A process reads a newer document, or no process acts by the oldest one any more. Team ledgers are lost."""
    if world.newest + 1 < len(bounds.documents):
        yield f"a process reads document {world.newest + 1}", world._replace(newest=world.newest + 1)
    if world.oldest < world.newest and all(each.document > world.oldest for each in world.procedures):
        yield f"no process has document {world.oldest}", world._replace(oldest=world.oldest + 1)
    for team, here in enumerate(world.teams):
        if here and world.team_losses:
            yield f"{team_name(team)} is lost", put_team(world, team, None)._replace(team_losses=world.team_losses - 1)
