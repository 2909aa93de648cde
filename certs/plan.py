"""What is true of a state: which certificates are due, whether calls can succeed, who still serves what."""

from __future__ import annotations

from datetime import datetime, timedelta

from cryptography import x509

from certs.state import (
    Certificates,
    Endpoint,
    Problem,
    State,
    fingerprint,
    in_look_ahead,
    is_valid,
    issued,
    names_of,
    signed_by,
    trusts,
)
from certs.steps import (
    PROPAGATION,
    Decision,
    Done,
    Forget,
    IssueLeaf,
    MakeAuthority,
    NoteServed,
    NoteTrusted,
    Promote,
    Refused,
    Seen,
    SetBundles,
    Terms,
    Wait,
    settle,
)
from certs.x509 import Signed, is_ours


def outdated(certificate: x509.Certificate, now: datetime, terms: Terms) -> str:
    """Why it is to be replaced; empty where it is not.

    An ``issued_before`` of the future counts for nothing: what is made now would be replaced again and again.
    """
    if not is_valid(certificate, now):
        return f"is valid from {shown(certificate.not_valid_before_utc)} to {shown(certificate.not_valid_after_utc)}"
    if terms.issued_before and issued(certificate) < terms.issued_before <= now:
        return f"was issued before {shown(terms.issued_before)}"
    if in_look_ahead(certificate, now):
        return f"has less than a third of its life left, until {shown(certificate.not_valid_after_utc)}"
    return ""


def broken(state: State, now: datetime, terms: Terms) -> str:
    """Why the serving Secret is of no use to a webhook that reads it now; empty where it is of use."""
    leaf = state.serving.leaf
    if leaf is None:
        return state.serving.fault
    if not is_valid(leaf.certificate, now):
        return f"the leaf {outdated(leaf.certificate, now, terms)}"
    if missing := names_of(terms.names) - names_of(leaf.certificate):
        return f"the leaf is not for {', '.join(sorted(missing))}"
    if not any(signed_by(leaf.certificate, authority) for authority in known(state)):
        return "the leaf is of a CA that is not known here"
    return ""


def known(state: State) -> Certificates:
    """Every authority in the CA Secret, in the order of their making."""
    signing = (state.authorities.current, state.authorities.following)
    return (*state.authorities.retired, *(one.certificate for one in signing if one))


def strays(state: State) -> Certificates:
    """Authorities of ours in caBundles that the CA Secret does not know: a backup was restored, or a part of it lost.

    They go as retired ones do, and are put into no other caBundle: their name alone does not make them trusted.
    """
    found = dict.fromkeys(one for hook in state.hooks() for one in hook.bundle if is_ours(one))
    return tuple(one for one in found if one not in known(state))


def published(state: State, authority: Signed | None) -> bool:
    """Whether every caBundle that may be written has ``authority``."""
    unlocked = (one for one in state.configurations if not one.locked)
    hooks = (hook for configuration in unlocked for hook in configuration.hooks)
    return authority is not None and all(authority.certificate in hook.bundle for hook in hooks)


def cut_off(state: State, authority: Signed | None, now: datetime) -> bool:
    """Whether calls that succeed now would fail if ``authority`` signed: of a configuration that may not be written.

    That is one which trusts what is served, or is about to be, and not the authority. What cannot be asked may show
    what it trusts.
    """
    if authority is None:
        return False
    leaf = state.serving.leaf
    leaves = [endpoint.leaf for endpoint in state.endpoints if endpoint.leaf] + ([leaf.certificate] if leaf else [])
    silent = any(endpoint.leaf is None for endpoint in state.ready())
    locked = (hook for configuration in state.configurations if configuration.locked for hook in configuration.hooks)
    without = [hook.bundle for hook in locked if authority.certificate not in hook.bundle]
    return any((silent and bundle) or any(trusts(bundle, one, now) for one in leaves) for bundle in without)


def served_everywhere(state: State, now: datetime) -> bool:
    """Whether some endpoint is ready, and all show a leaf of the current authority."""
    return bool(state.ready()) and not others(state, now)


def others(state: State, now: datetime) -> list[Endpoint]:
    """The endpoints that do not show a leaf of the current authority. One that is not ready counts if it answers."""
    current = state.authorities.current
    bundle = (current.certificate,) if current else ()
    asked = [endpoint for endpoint in state.endpoints if endpoint.ready or endpoint.leaf is not None]
    return [endpoint for endpoint in asked if not trusts(bundle, endpoint.leaf, now)]


def may_work(state: State, now: datetime) -> bool:
    """Whether a call may succeed: a caBundle trusts what a ready endpoint shows, or one cannot be asked from here."""
    return any(
        endpoint.leaf is None or trusts(hook.bundle, endpoint.leaf, now)
        for endpoint in state.ready()
        for hook in state.hooks()
    )


def current_signs(state: State, now: datetime) -> bool:
    """Whether the current authority can sign a leaf."""
    current = state.authorities.current
    return current is not None and is_valid(current.certificate, now)


def noted_since(state: State, now: datetime, *, served: bool) -> datetime | None:
    """Since when the current authority is served everywhere, or the next one trusted everywhere, as was written down.

    A time in the future was written by a clock that went wrong: it says nothing.
    """
    there = state.authorities
    mark, authority = (there.served, there.current) if served else (there.trusted, there.following)
    if mark is None or authority is None or mark.fingerprint != fingerprint(authority.certificate) or mark.since > now:
        return None
    return mark.since


def shown(moment: datetime) -> str:
    """Return the moment for people, in UTC."""
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


_UNCALLED = "no webhook configuration with our label calls the Service"
_UNREGISTERED = (
    "the CA has to be replaced, and whoever calls the Service has to be given the next one, which nobody can tell from "
    "here: delete both Secrets to have it replaced by the next run, and restart the callers then"
)
_MOMENT = "the API servers are given a moment to read the caBundles"


def plan(state: State, now: datetime, terms: Terms, seen: Seen) -> Decision:
    """Return what comes next: of these, the first that applies. Their order is the order of the steps."""
    if state.problems:
        return Refused(state.problems)
    if state.tool:
        return Done(None)
    return (
        _authority(state, now, terms)
        or _bundles(state, now, terms, seen)
        or _broken_leaf(state, now, terms, seen)
        or _following(state, now, terms, seen)
        or _due_leaf(state, now, terms, seen)
        or _propagation(state, now, terms)
        or _retirement(state, now, terms, seen)
        or _end(state, now, terms)
    )


def _authority(state: State, now: datetime, terms: Terms) -> Decision | None:
    """(a) The next authority is made when the current one is of no use, or has less than its look-ahead left."""
    following, current = state.authorities.following, state.authorities.current
    if following is None and current is None:
        return MakeAuthority("; ".join(state.authorities.faults) or "there is no CA")
    newest, which = (following, "the next CA") if following else (current, "the CA")
    reason = outdated(newest.certificate, now, terms) if newest else ""
    return MakeAuthority(f"{which} {reason}") if reason else None


def _bundles(state: State, now: datetime, terms: Terms, seen: Seen) -> Decision | None:
    """(b) Every caBundle has every authority of which a leaf may be served; (e) a retired one only while that is so.

    Once nobody serves a leaf of theirs, retired ones are not put back where they are missing: else of two runs, of
    which one has waited longer than the other, or was killed while it took them out, each would undo the other's work.
    """
    retired = frozenset((*state.authorities.retired, *strays(state)))
    needed = _unserved(state, now, terms) is not None
    unwanted = retired if not needed and _retained(state, now, terms, seen) is None else frozenset()
    wanted = tuple(one for one in known(state) if is_valid(one, now) and (needed or one not in retired))
    reason = "it need not trust the retired CA any more" if unwanted else "it has to trust every CA that may be served"
    for configuration in (one for one in state.configurations if not one.locked):
        bundles = tuple(_bundle(hook.bundle, wanted, unwanted) for hook in configuration.hooks)
        if any(hook.faulty for hook in configuration.hooks) or bundles != configuration.bundles():
            return SetBundles(str(configuration), bundles, reason)
    return None


def _bundle(present: Certificates, wanted: Certificates, unwanted: frozenset[x509.Certificate]) -> Certificates:
    """What is there, less the unwanted, and what is missing after it. Certificates that are not ours stay."""
    kept = tuple(one for one in present if one not in unwanted)
    return (*kept, *(one for one in wanted if one not in kept))


def _broken_leaf(state: State, now: datetime, terms: Terms, seen: Seen) -> Decision | None:
    """A serving Secret of no use is mended at once, by the current authority, which has had its overlap."""
    reason = broken(state, now, terms)
    if not reason or not current_signs(state, now):
        return None
    if cut_off(state, state.authorities.current, now):
        return Refused(state.locked())
    return _settling(state, now, terms, seen.current) or IssueLeaf(reason)


def _following(state: State, now: datetime, terms: Terms, seen: Seen) -> Decision | None:
    """(c) The next authority takes over; until it may, whatever it waits for, a leaf in its look-ahead is renewed."""
    decision = _promotion(state, now, terms, seen)
    if isinstance(decision, Wait | Refused):
        return _ageing_leaf(state, now, terms, seen) or decision
    return decision


def _promotion(state: State, now: datetime, terms: Terms, seen: Seen) -> Decision | None:
    """The next authority signs from when it has been trusted everywhere for the overlap."""
    if state.authorities.following is None:
        return None
    if cut_off(state, state.authorities.following, now):
        return Refused(state.locked())
    if reason := broken(state, now, terms):
        return _settling(state, now, terms, seen.following) or Promote(f"nothing is gained by waiting: {reason}")
    if problem := _untrusting(state, terms):
        return Refused((problem,))
    since = noted_since(state, now, served=False)
    if since is None:
        return NoteTrusted("every caBundle was read back and has the next CA")
    reason = "the API servers are given time to trust the next CA"
    return _lasting(since, terms.overlap, seen.following, now, reason) or Promote(
        "every caBundle has had the next CA for the overlap"
    )


def _untrusting(state: State, terms: Terms) -> Problem | None:
    """Why nobody is known to trust the next authority."""
    if not terms.registered:
        return Problem(_UNREGISTERED, terms.commands.replace)
    if not any(state.hooks()):
        return Problem(f"{_UNCALLED}, so none could trust the next CA{_elsewhere(state)}", terms.commands.register)
    return None


def _ageing_leaf(state: State, now: datetime, terms: Terms, seen: Seen) -> Decision | None:
    """A leaf in its look-ahead is renewed by the current authority where that gains time, and none trusts it less."""
    leaf, current = state.serving.leaf, state.authorities.current
    if leaf is None or current is None or not in_look_ahead(leaf.certificate, now):
        return None
    trusted = signed_by(leaf.certificate, current.certificate) or not cut_off(state, current, now)
    if not current_signs(state, now) or not trusted or current.expires <= leaf.expires:
        return None
    return _settling(state, now, terms, seen.current) or IssueLeaf(f"the leaf {outdated(leaf.certificate, now, terms)}")


def _due_leaf(state: State, now: datetime, terms: Terms, seen: Seen) -> Decision | None:
    """A leaf is renewed in time, and after a change of the authority; the one before is trusted all along."""
    leaf, current = state.serving.leaf, state.authorities.current
    if leaf is None or current is None:
        return None
    of_another = not signed_by(leaf.certificate, current.certificate)
    reason = "is of the CA before" if of_another else outdated(leaf.certificate, now, terms)
    if not reason:
        return None
    return _settling(state, now, terms, seen.current) or IssueLeaf(f"the leaf {reason}")


def _propagation(state: State, now: datetime, terms: Terms) -> Decision | None:
    """(d) Every ready endpoint is dialled, and shows the leaf that is in the Secret."""
    leaf = state.serving.leaf
    lagging = [endpoint for endpoint in state.ready() if leaf is None or endpoint.leaf != leaf.certificate]
    return _lag([f"{one.address}: {one.fault or 'an earlier leaf'}" for one in lagging], state, now, terms)


def _retirement(state: State, now: datetime, terms: Terms, seen: Seen) -> Decision | None:
    """(e) A retired authority, which `_bundles` has just found in no caBundle any more, is forgotten."""
    retired = state.authorities.retired
    if not retired and not strays(state):
        return None
    if waiting := _unserved(state, now, terms) or _retained(state, now, terms, seen):
        return waiting
    locked = any(one in hook.bundle for hook in state.hooks() for one in retired)
    return Forget("no caBundle has the retired CA any more") if retired and not locked else None


def _unserved(state: State, now: datetime, terms: Terms) -> Decision | None:
    """What has to happen before every endpoint is known to serve a leaf of the current authority; None where it is."""
    leaf, current = state.serving.leaf, state.authorities.current
    if leaf is None or current is None or not signed_by(leaf.certificate, current.certificate):
        return Wait("there is no leaf of the current CA yet")
    if not state.ready():
        text = "no endpoint is ready, so none has shown the new leaf, and the old CA stays trusted"
        return Refused((Problem(text, terms.commands.endpoints),))
    if not served_everywhere(state, now):
        return _lag([f"{one.address}: not a leaf of the current CA" for one in others(state, now)], state, now, terms)
    if noted_since(state, now, served=True) is None:
        return NoteServed("every endpoint was dialled and shows a leaf of the current CA")
    return None


def _retained(state: State, now: datetime, terms: Terms, seen: Seen) -> Wait | None:
    """Wait until every endpoint has served a leaf of the current authority for the retention."""
    since = noted_since(state, now, served=True) or now
    return _lasting(since, terms.retention, seen.served, now, "the retired CA stays trusted for its retention")


def _lag(told: list[str], state: State, now: datetime, terms: Terms) -> Decision | None:
    """Wait for endpoints that do not show the new leaf; one that takes longer than kubelet may is a person's to see."""
    if not told or state.serving.leaf is None:
        return None
    made = issued(state.serving.leaf.certificate)
    if now - made < PROPAGATION:
        return Wait(f"not every endpoint serves the new leaf yet ({'; '.join(told)})")
    text = f"not every endpoint serves the leaf of {shown(made)} ({'; '.join(told)})"
    return Refused((Problem(text, terms.commands.restart),))


def _settling(state: State, now: datetime, terms: Terms, seen: timedelta) -> Wait | None:
    """A moment for the API servers, in case this run, or a person, has only just changed a caBundle."""
    left = settle(terms.overlap) - seen
    return Wait(_MOMENT, now + left) if left > timedelta() and may_work(state, now) else None


def _lasting(since: datetime, span: timedelta, seen: timedelta, now: datetime, reason: str) -> Wait | None:
    """Wait for ``span`` from ``since`` by the wall clock, and until this run has seen it for a moment by itself."""
    until = max(since + span, now + settle(span) - seen)
    return Wait(reason, until) if until > now else None


def _elsewhere(state: State) -> str:
    return f" ({'; '.join(state.left_alone)})" if state.left_alone else ""


def _end(state: State, now: datetime, terms: Terms) -> Done | Refused:
    """All is done, but for what a person has to unlock, and for who should call and answer."""
    problems = (*idle(state, now, terms), *state.locked())
    return Refused(problems) if problems else Done(_next_due(state))


def idle(state: State, now: datetime, terms: Terms) -> tuple[Problem, ...]:
    """What a person has to see to before any call can succeed, though the certificates are as they should be.

    A fresh leaf may be the first one, for which the webhook waits before it starts: it is given time.
    """
    leaf = state.serving.leaf
    if leaf and now - issued(leaf.certificate) < PROPAGATION:
        return ()
    uncalled = Problem(f"{_UNCALLED}{_elsewhere(state)}", terms.commands.register)
    unanswered = Problem("no endpoint is ready, so no call is answered", terms.commands.endpoints)
    found = ((uncalled, terms.registered and not any(state.hooks())), (unanswered, not state.ready()))
    return tuple(problem for problem, there in found if there)


def _next_due(state: State) -> datetime | None:
    """When the first certificate enters its look-ahead."""
    ours = [one.certificate for one in (state.serving.leaf, state.authorities.current) if one]
    return min((one.not_valid_after_utc - (one.not_valid_after_utc - issued(one)) / 3 for one in ours), default=None)
