"""Turns a step into what is to be written, and says what the state is once it has been."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from certs.plan import strays
from certs.state import Authorities, Certificates, Hook, Mark, Serving, State, fingerprint
from certs.steps import Forget, IssueLeaf, MakeAuthority, NoteServed, NoteTrusted, Promote, SetBundles, Step, Terms
from certs.x509 import Signed, is_ours, make_authority, make_leaf


@dataclass(frozen=True, slots=True)
class WriteAuthorities:
    """The CA Secret is to be as ``after``, provided that it still has the version there."""

    after: Authorities


@dataclass(frozen=True, slots=True)
class WriteServing:
    """The serving Secret is to hold this leaf, provided that it still has ``version``."""

    version: str
    leaf: Signed
    authorities: Certificates


@dataclass(frozen=True, slots=True)
class WriteBundles:
    """The webhooks of a configuration are to have these caBundles, provided that it still has ``version``.

    ``indices`` are their places in its list, one a bundle.
    """

    kind: str
    name: str
    version: str
    indices: tuple[int, ...]
    bundles: tuple[Certificates, ...]


Write = WriteAuthorities | WriteServing | WriteBundles


def write_of(step: Step, state: State, now: datetime, terms: Terms) -> Write:
    """Return what ``step`` writes; new keys are made here."""
    match step:
        case SetBundles():
            return _bundles(step, state)
        case IssueLeaf():
            return _leaf(state, now, terms)
        case _:
            return WriteAuthorities(_authorities(step, state, now, terms))


def after(state: State, write: Write) -> State:
    """Return the state once ``write`` has succeeded, but for the new versions, and for endpoints that follow later."""
    match write:
        case WriteAuthorities():
            return replace(state, authorities=write.after)
        case WriteServing():
            return replace(state, serving=Serving(write.version, write.leaf, write.authorities, ""))
        case WriteBundles():
            every = tuple(
                replace(one, hooks=tuple(map(_with_bundle, one.hooks, write.bundles)))
                if (one.kind, one.name) == (write.kind, write.name)
                else one
                for one in state.configurations
            )
            return replace(state, configurations=every)


def _authorities(
    step: MakeAuthority | NoteTrusted | Promote | NoteServed | Forget, state: State, now: datetime, terms: Terms
) -> Authorities:
    there = state.authorities
    match step:
        case MakeAuthority():
            return _with_following(state, now, terms)
        case NoteTrusted():
            return replace(there, trusted=_mark(there.following, now))
        case Promote():
            retired = (*there.retired, *_certificates(there.current))
            return replace(there, current=there.following, following=None, retired=retired)
        case NoteServed():
            return replace(there, served=_mark(there.current, now))
        case Forget():
            return replace(there, retired=())


def _with_following(state: State, now: datetime, terms: Terms) -> Authorities:
    """A new authority to follow. What it replaces is retired, and so is what only the caBundles still know of.

    They do where the CA Secret was lost: their leaves are served until the new one's are, and are dropped then.
    """
    there = state.authorities
    lost = () if there.current else _found_elsewhere(state)
    retired = dict.fromkeys((*there.retired, *_certificates(there.following), *lost))
    following = make_authority(now, terms.authority_life)
    return replace(there, following=following, retired=tuple(retired), trusted=None, faults=())


def _found_elsewhere(state: State) -> Certificates:
    return (*filter(is_ours, state.serving.authorities), *strays(state))


def _bundles(step: SetBundles, state: State) -> WriteBundles:
    [target] = [one for one in state.configurations if str(one) == step.configuration]
    indices = tuple(hook.index for hook in target.hooks)
    return WriteBundles(target.kind, target.name, target.version, indices, step.bundles)


def _leaf(state: State, now: datetime, terms: Terms) -> WriteServing:
    current = state.authorities.current
    if current is None:
        raise ValueError("there is no current CA to sign a leaf")
    leaf = make_leaf(current, terms.names, now, terms.leaf_life)
    return WriteServing(state.serving.version, leaf, (current.certificate,))


def _mark(authority: Signed | None, now: datetime) -> Mark | None:
    return Mark(fingerprint(authority.certificate), now) if authority else None


def _certificates(authority: Signed | None) -> Certificates:
    return (authority.certificate,) if authority else ()


def _with_bundle(hook: Hook, bundle: Certificates) -> Hook:
    return replace(hook, bundle=bundle, faulty=False)
