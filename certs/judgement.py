"""What is true of a state: which certificates are due, whether calls can succeed, who still serves what."""

from __future__ import annotations

from datetime import datetime

from cryptography import x509

from certs.authority import Signed, is_ours
from certs.state import (
    Certificates,
    Endpoint,
    State,
    fingerprint,
    in_look_ahead,
    is_valid,
    issued,
    names_of,
    signed_by,
    trusts,
)
from certs.steps import Terms


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
