"""The words of a plan: what is wanted, the steps there are, and the other answers to "what comes next?"."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from certs.state import Certificates, Problem
from certs.x509 import AUTHORITY_LIFE, LEAF_LIFE, Names

OVERLAP = timedelta(hours=1)
RETENTION = timedelta(days=1)

SETTLE = timedelta(seconds=10)
"""How long a run has to have seen a state by itself before it goes by it: a wall clock that jumps cannot shorten that.

API servers take up a changed caBundle within about a second.
"""

PROPAGATION = timedelta(minutes=10)
"""How long an endpoint may take to serve a new leaf before a person should look: kubelet takes up to 100 s."""


@dataclass(frozen=True, slots=True)
class Commands:
    """What to tell a person to run."""

    restart: str = "kubectl -n vcuda-quota rollout restart deployment/vcuda-webhook"
    endpoints: str = "kubectl -n vcuda-quota get pods,endpointslices"
    rehearse: str = "vcuda-certs rotate --dry-run"
    allow: str = "kubectl edit clusterrole vcuda-certs"
    register: str = "kubectl label validatingwebhookconfiguration NAME app.kubernetes.io/part-of=vcuda-quota"
    replace: str = "kubectl -n vcuda-quota delete secret vcuda-webhook-ca vcuda-webhook-tls"


@dataclass(frozen=True, slots=True)
class Terms:
    """What is wanted.

    ``overlap``: how long a new authority is trusted everywhere before a leaf of its own is served. ``retention``: how
    long the old one is trusted after the last leaf of its own was served. ``issued_before``: certificates made before
    then are replaced, however long they live. ``registered``: webhook configurations are to call the Service.
    """

    names: Names
    authority_life: timedelta = AUTHORITY_LIFE
    leaf_life: timedelta = LEAF_LIFE
    overlap: timedelta = OVERLAP
    retention: timedelta = RETENTION
    issued_before: datetime | None = None
    registered: bool = True
    commands: Commands = field(default_factory=Commands)


@dataclass(frozen=True, slots=True)
class Seen:
    """How long this run itself has seen things without a break, by a clock that does not jump.

    ``following`` and ``current``: that authority in every caBundle that may be written. ``served``: every endpoint with
    a leaf of the current one.
    """

    following: timedelta = timedelta()
    current: timedelta = timedelta()
    served: timedelta = timedelta()


@dataclass(frozen=True, slots=True)
class MakeAuthority:
    """Make the next authority and keep it beside the current one."""

    reason: str


@dataclass(frozen=True, slots=True)
class SetBundles:
    """Give one configuration's webhooks these caBundles, in the order of its hooks."""

    configuration: str
    bundles: tuple[Certificates, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class NoteTrusted:
    """Write down since when the next authority is trusted everywhere."""

    reason: str


@dataclass(frozen=True, slots=True)
class Promote:
    """Let the next authority be the current one, and retire the one before."""

    reason: str


@dataclass(frozen=True, slots=True)
class IssueLeaf:
    """Put a new leaf of the current authority into the serving Secret."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoteServed:
    """Write down since when every endpoint serves a leaf of the current authority."""

    reason: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Forget the retired authorities: no caBundle holds them any more."""

    reason: str


Step = MakeAuthority | SetBundles | NoteTrusted | Promote | IssueLeaf | NoteServed | Forget


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing may be done before ``until``, or, where that is None, before the endpoints have changed."""

    reason: str
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing more can be done before a person has done something."""

    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """All is as it should be until ``until``; None where nothing here is ours."""

    until: datetime | None


Decision = Step | Wait | Refused | Done


def settle(span: timedelta) -> timedelta:
    """How long a run has to see by itself what a wall clock says has held for ``span``."""
    return min(SETTLE, span)
