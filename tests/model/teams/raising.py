"""The rules for admissions: JOIN, ADMIT and RAISE. Each rule yields the steps that it permits.

A RAISE has three steps: read the ledger of a namespace, write the team ledger, write the ledger that was read.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from tests.model.teams.world import (
    MODELS,
    NAMESPACES,
    NONE,
    NOTHING,
    UNSEEN,
    Allotment,
    Amount,
    Bounds,
    Document,
    Ledger,
    Limits,
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
    within,
)

Step = tuple[str, World]
"""A sentence that describes the step, and the state (world) after it."""

Rule = Callable[[World, Bounds], Iterator[Step]]


def name(namespace: int) -> str:
    return "mn"[namespace]


def team_name(team: int) -> str:
    return "XY"[team]


def put(world: World, namespace: int, ledger: Ledger | None, **others: Any) -> World:
    """CAS: return the world (state) after a write of a namespace's ledger. A RAISE that read it before is rejected."""
    procedures = [
        each._replace(fresh=False) if each.kind == "RAISE" and each.namespace == namespace else each
        for each in others.pop("procedures", world.procedures)
    ]
    ledgers = with_item(world.ledgers, namespace, ledger)
    return world._replace(ledgers=ledgers, procedures=tuple(procedures), **others)


def put_team(world: World, team: int, ledger: TeamLedger | None, **others: Any) -> World:
    """CAS: return the world (state) after a write of a team ledger. A LOWER or OPEN that read it before is rejected."""
    procedures = others.pop("procedures", world.procedures)
    left = tuple([each for each in procedures if each.kind == "RAISE" or each.team != team])
    return world._replace(teams=with_item(world.teams, team, ledger), procedures=left, **others)


def without(world: World, procedure: Procedure) -> tuple[Procedure, ...]:
    return tuple([each for each in world.procedures if each is not procedure])


def begin(world: World, bounds: Bounds, new: Procedure) -> Iterator[Step]:
    if len(world.procedures) < bounds.procedures and new not in world.procedures:
        what = f"{new.kind} of {team_name(new.team)}"
        if new.kind == "RAISE":
            what += f" for {name(new.namespace)}" + (f", one more of {new.adds}," if new.adds != NONE else "")
        yield f"{what} begins with document {new.document}", world._replace(procedures=(*world.procedures, new))


def give_up(world: World, bounds: Bounds) -> Iterator[Step]:
    """A process ends, and its next write is never stored. A procedure that has only read leaves nothing behind."""
    del bounds
    for each in world.procedures:
        if each.checked is not None or each.seen != (UNSEEN, UNSEEN):
            yield f"{each.kind} of {team_name(each.team)} is given up", world._replace(procedures=without(world, each))


def is_newer(ledger: Ledger, document: int, bounds: Bounds) -> bool:
    """PLACED: return whether this document may change the teams that a namespace's ledger names."""
    return document > ledger.team_version or bounds.broken == "an older document moves"


def may_use(ledger: Ledger, document: int, team: int, bounds: Bounds) -> bool:
    """PLACED: return whether a process with this document may admit in the namespace."""
    newer = document >= ledger.team_version or bounds.broken == "an older document admits"
    return newer or ledger.names == ((team,) if team != NONE else ())


def place(world: World, bounds: Bounds) -> Iterator[Step]:
    """JOIN and LEAVE: a newer document changes the teams that the ledger of a namespace names, by a separate write.

    The ledger names the old team until its usage is covered in the new one.
    """
    for n in NAMESPACES:
        for number in documents(world):
            ledger, team = world.ledgers[n], bounds.documents[number].places[n]
            if ledger is None:
                continue
            if bounds.broken == ENDED and world.gone[n] and ledger.names:
                yield f"{name(n)} leaves its team", put(world, n, ledger._replace(allotments=(None, None)))
            if not is_newer(ledger, number, bounds):
                continue
            if team == NONE and ledger.names:
                left = ledger._replace(allotments=(None, None), team_version=number)
                yield f"{name(n)} leaves its team", put(world, n, left, member=with_item(world.member, n, NONE))
            elif team != NONE and team not in ledger.names:
                yield f"{name(n)} joins {team_name(team)}", put(world, n, joined(ledger, team, number))


def joined(ledger: Ledger, team: int, document: int) -> Ledger:
    return ledger._replace(allotments=with_item(ledger.allotments, team, Allotment()), team_version=document)


def admit(world: World, bounds: Bounds) -> Iterator[Step]:
    """ADMIT: a replica admits a pod by one write if the allotment covers the usage. Otherwise it begins a RAISE."""
    for n in NAMESPACES:
        ledger = world.ledgers[n]
        for number in documents(world) if ledger and ledger.open else ():
            document = bounds.documents[number]
            team = document.places[n]
            assert ledger
            for model in MODELS[: bounds.models]:
                want = plus(ledger.used, one(model))
                unchecked = bounds.broken == "the limit of the namespace is not checked"
                if not (within(want, document.namespaces[n]) or unchecked) or not may_use(ledger, number, team, bounds):
                    continue
                if is_allotted(ledger, team, want, number, bounds):
                    new, member = ledger._replace(used=want), with_item(world.member, n, team)
                    words = f"{name(n)} admits one of {model} with document {number}"
                    yield words, admitted(put(world, n, new, member=member), bounds, n, model)
                elif bounds.broken == UNCHECKED and covers(ledger.used, plus(world.held[n], one(model))):
                    new = ledger._replace(used=plus(world.held[n], one(model)))
                    yield f"{name(n)} admits one in place of another", admitted(put(world, n, new), bounds, n, model)
                elif team in ledger.names or (team != NONE and bounds.broken == "a join and its raise are one write"):
                    yield from begin(world, bounds, Procedure("RAISE", n, team, number, model, want))


UNCHECKED = "a pod takes the place of another without a check"


def is_allotted(ledger: Ledger, team: int, want: Amount, document: int, bounds: Bounds) -> bool:
    """Return whether the ledger may use this amount without a look at the team ledger."""
    if team == NONE:
        return not ledger.names
    own = ledger.allotments[team]
    if not own or ledger.names != (team,) or not covers(own.charges, want):
        return False
    if bounds.broken == "the terms are the limits" and own.terms != NONE:
        return bounds.documents[own.terms].teams[team] == bounds.documents[document].teams[team]
    return own.terms == document or bounds.broken == "the terms are not compared"


def admitted(world: World, bounds: Bounds, namespace: int, model: int) -> World:
    """Return the world (state) after an admission, with a fault if the usage now exceeds a limit."""
    world = world._replace(held=with_item(world.held, namespace, plus(world.held[namespace], one(model))))
    counted = [less(held, brought) for held, brought in zip(world.held, world.brought, strict=True)]
    fault, team = "", world.member[namespace]
    if not within(counted[namespace], most(world, bounds, lambda each: each.namespaces[namespace])):
        fault = f"{name(namespace)} uses {counted[namespace]}"
    used = NOTHING
    for n in NAMESPACES:
        used = plus(used, counted[n]) if world.member[n] == team else used
    if team != NONE and not within(used, most(world, bounds, lambda each: each.teams[team])):
        fault = f"team {team_name(team)} uses {used}"
    return world._replace(fault=fault)


def most(world: World, bounds: Bounds, choose: Callable[[Document], Limits]) -> Limits:
    """Return the largest limits by which any process may act now."""
    rows = [choose(bounds.documents[each]) for each in documents(world)]
    return max(row[0] for row in rows), max(row[1] for row in rows), max(row[2] for row in rows)


def cover(world: World, bounds: Bounds) -> Iterator[Step]:
    """COVER: a RAISE for usage that exists already: the namespace joined the team, or pods were not admitted."""
    for n in NAMESPACES:
        ledger = world.ledgers[n]
        for number in documents(world) if ledger and ledger.open and bounds.broken != "no move is completed" else ():
            assert ledger
            team = bounds.documents[number].places[n]
            own = ledger.allotments[team] if team != NONE else None
            done = own and covers(own.charges, ledger.used) and ledger.names == (team,)
            if own and not done and number >= ledger.team_version:
                yield from begin(world, bounds, Procedure("RAISE", n, team, number, want=ledger.used))


def raise_team(world: World, bounds: Bounds) -> Iterator[Step]:
    """RAISE, second step: write the team ledger, even if it allots enough. No RAISE lowers an allotment.

    If usage that exists already does not fit, the team ledger is closed. OPEN then counts the usage of the whole team.
    """
    for each in world.procedures:
        here = world.teams[each.team]
        if each.kind != "RAISE" or each.checked is not None or not is_raisable(here, each.document, bounds):
            continue
        n, before = each.namespace, here.allotted[each.namespace] or NOTHING
        checked, terms = checked_amount(world, bounds, each, here)
        forced = bounds.broken == "a forced raise keeps the other allotments" or covers(before, each.want)
        if checked is None and each.adds == NONE and forced:
            checked = each.want
        if checked is not None:
            amount = checked if bounds.broken == "a raise lowers" else largest(before, checked)
            raised = each._replace(checked=amount if bounds.broken == ALL_ALLOTTED else checked, terms=terms)
            new = here._replace(
                allotted=with_item(here.allotted, n, amount), document=max(each.document, here.document)
            )
            procedures = (*without(world, each), raised)
            words = f"{team_name(each.team)} allots {amount} to {name(n)}"
            if bounds.broken == "enough is allotted already" and here.allotted[n] == amount:
                yield words, world._replace(procedures=procedures)
            elif bounds.broken == "the team ledger is read last":
                yield words, world._replace(teams=with_item(world.teams, each.team, new), procedures=procedures)
            else:
                yield words, put_team(world, each.team, new, procedures=procedures)
        elif each.adds == NONE:
            new = here._replace(closed=True)
            closes = put_team(world, each.team, new, procedures=without(world, each))
            yield f"{team_name(each.team)} is closed because {name(n)} does not fit", closes


def is_raisable(here: TeamLedger | None, document: int, bounds: Bounds) -> TypeGuard[TeamLedger]:
    if here is None or here.closed:
        return here is not None and bounds.broken == "a raise in a closed team ledger"
    return document == here.document or bounds.broken == "an older document raises"


ENDED = "a namespace that seems to have ended leaves its team"
ALL_ALLOTTED = "the ledger is charged with all that is allotted"


def checked_amount(world: World, bounds: Bounds, procedure: Procedure, here: TeamLedger) -> tuple[Amount | None, int]:
    """CHECK: return the largest amount that fits the team's limits with the allotments of the others, and its terms."""
    others, n = NOTHING, procedure.namespace
    for other, amount in enumerate(here.allotted):
        if other != n and bounds.broken == "only the usage of the others counts":
            ledger = world.ledgers[other]
            others = ledger.used if ledger else NOTHING
        elif other != n and amount:
            others = plus(others, amount)
    limits = bounds.documents[procedure.document].teams[procedure.team]
    if bounds.broken == "the total is not checked":
        limits = (*limits[:2], 99)
    all_allotted = largest(here.allotted[n] or NOTHING, procedure.want)
    for amount in (procedure.want,) if bounds.broken == "a raise lowers" else (all_allotted, procedure.want):
        if within(plus(others, amount), limits) or bounds.broken == "the limit of the team is not checked":
            return amount, procedure.document
    return None, NONE


def raise_ledger(world: World, bounds: Bounds) -> Iterator[Step]:
    """RAISE, third step: write the namespace's ledger, with the usage and what was checked for it."""
    for each in world.procedures:
        ledger, n, want, checked = world.ledgers[each.namespace], each.namespace, each.want, each.checked
        early = bounds.broken == "the ledger before the team ledger" and checked is None
        if each.kind != "RAISE" or ledger is None or not ledger.open or (checked is None and not early):
            continue
        if not each.fresh:
            if bounds.broken != AGAIN or each.team not in ledger.names:
                continue
            want = plus(ledger.used, one(each.adds))
        own, checked = ledger.allotments[each.team], checked or want
        if not covers(checked, want):
            continue
        if own and bounds.broken == "unused allotments of other models are kept":
            checked = largest(checked, own.charges)
        alone = with_item((None, None), each.team, Allotment(checked, each.document if early else each.terms))
        team_version = ledger.team_version if ledger.names == (each.team,) else max(ledger.team_version, each.document)
        new = ledger._replace(used=want, allotments=alone, team_version=team_version)
        left = world.procedures if early else without(world, each)
        member, brought = with_item(world.member, n, each.team), still_brought(world, n, want, one(each.adds))
        after = put(world, n, new, procedures=left, member=member, brought=brought)
        words = f"{name(n)} uses {want} of {checked} in {team_name(each.team)}"
        yield words, admitted(after, bounds, n, each.adds) if each.adds != NONE else after


AGAIN = "only the last write is tried again"


def still_brought(world: World, namespace: int, counted: Amount, more: Amount = NOTHING) -> tuple[Amount, ...]:
    """Return the usage that a team need not count, after it has counted an amount. ``more``: a pod admitted now."""
    left = smallest(world.brought[namespace], less(plus(world.held[namespace], more), counted))
    return with_item(world.brought, namespace, left)
