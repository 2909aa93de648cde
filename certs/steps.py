"""The steps of a rotation, its other decisions, and the writes of each step."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from certs import state as observed
from vcuda.x509 import AUTHORITY_LIFE, LEAF_LIFE, Names, Signed, is_ours, make_authority, make_client, make_leaf

OVERLAP = timedelta(hours=1)
RETENTION = timedelta(days=1)

# Time for which a run itself must have seen a state before it acts on it, so that a jump of the wall clock cannot
# shorten it. API servers use a changed caBundle within about a second.
SETTLE = timedelta(seconds=10)

# Webhooks take longer: kubelet updates a mounted ConfigMap at its next sync, up to about 100 s in all.
CLIENT_SETTLE = timedelta(minutes=2)

# Time for an endpoint to serve a new leaf before a person should check it. kubelet updates a mounted Secret at its next
# sync (60 s and a jitter), from a cache that may be older: up to about 100 s in all.
PROPAGATION = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands that messages recommend."""

    restart: str = "kubectl -n vcuda-quota rollout restart deployment/vcuda-webhook"
    endpoints: str = "kubectl -n vcuda-quota get pods,endpointslices"
    dry_run: str = "vcuda-certs rotate --dry-run"
    allow: str = "kubectl edit clusterrole vcuda-certs"
    register: str = "kubectl label validatingwebhookconfiguration NAME app.kubernetes.io/part-of=vcuda-quota"
    replace: str = "kubectl -n vcuda-quota delete secret vcuda-webhook-ca vcuda-webhook-tls"


@dataclass(frozen=True, slots=True)
class RotationPolicy:
    """The settings of a rotation.

    ``overlap``: time for which a new authority is trusted everywhere before a leaf of it is served.
    ``retention``: time for which the old authority is trusted after its last leaf was served.
    ``issued_before``: certificates from before this time are replaced, however long they are valid.
    ``registered``: webhook configurations must call the Service.
    ``client``: the common name of a client certificate, which API servers present to the webhook; empty for the serving
    certificate.
    ``installed``: a person states that all API servers present the pair in the Secret.
    ``registers_only``: another tool issues the certificates, and a run only registers webhooks.
    """

    names: Names
    authority_life: timedelta = AUTHORITY_LIFE
    leaf_life: timedelta = LEAF_LIFE
    overlap: timedelta = OVERLAP
    retention: timedelta = RETENTION
    issued_before: datetime | None = None
    registered: bool = True
    client: str = ""
    installed: bool = False
    registers_only: bool = False
    commands: Commands = field(default_factory=Commands)

    @property
    def readers(self) -> str:
        """The programs that trust by the caBundles."""
        return "webhooks" if self.client else "API servers"

    def settle(self, span: timedelta) -> timedelta:
        """The time for which a run itself must see a condition that holds for ``span`` by the wall clock."""
        return min(CLIENT_SETTLE if self.client else SETTLE, span)


@dataclass(frozen=True, slots=True)
class SeenFor:
    """How long this run has seen conditions without a break, by a clock that does not jump.

    ``next_ca``, ``current``: every caBundle that may be written has this authority. ``served``: every endpoint serves a
    leaf of the current authority.
    """

    next_ca: timedelta = timedelta()
    current: timedelta = timedelta()
    served: timedelta = timedelta()


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A step with the reason for it. The name of the class is the name that people see."""

    reason: str


class MakeAuthority(Reasoned):
    """Make the next authority, and store it together with the current one."""


@dataclass(frozen=True, slots=True)
class SetBundles:
    """Give one configuration's webhooks these caBundles, in the order of its hooks."""

    configuration: str
    bundles: tuple[observed.Certificates, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RegisterWebhooks:
    """Give one configuration its declared webhooks, with these caBundles."""

    configuration: str
    bundles: tuple[observed.Certificates, ...]
    reason: str


class NoteTrusted(Reasoned):
    """Record since when the next authority is trusted everywhere."""


class Promote(Reasoned):
    """Make the next authority the current one, and retire the previous one."""


class IssueLeaf(Reasoned):
    """Put a new leaf of the current authority into the serving Secret."""


class NoteServed(Reasoned):
    """Record since when every endpoint serves a leaf of the current authority."""


class Forget(Reasoned):
    """Delete the retired authorities, which no caBundle has any more."""


Step = MakeAuthority | SetBundles | RegisterWebhooks | NoteTrusted | Promote | IssueLeaf | NoteServed | Forget


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until ``until``, or if that is None, until the endpoints have changed."""

    reason: str
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class StepRefused:
    """Stop, because a person must solve a problem first."""

    problems: tuple[observed.Problem, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing is due now."""

    until: datetime | None
    """The time of the next step; None if no certificate is ours."""
    reason: str = ""
    """Why nothing is due if no certificate is ours."""


End = Wait | StepRefused | Done
"""The end of a run. It is a wait if the next step is beyond the budget."""

Decision = Step | End


@dataclass(frozen=True, slots=True)
class WriteAuthorities:
    """Write the CA Secret as ``after``, if it still has the version in it."""

    after: observed.Authorities


@dataclass(frozen=True, slots=True)
class WriteServing:
    """Write this leaf into the serving Secret, if it still has ``version``."""

    version: str
    leaf: Signed
    authorities: observed.Certificates


@dataclass(frozen=True, slots=True)
class WriteBundles:
    """Write these caBundles into the webhooks of a configuration, if it still has ``version``.

    ``indices``: the places of the webhooks in its list, one for each bundle.
    """

    kind: str
    name: str
    version: str
    indices: tuple[int, ...]
    bundles: tuple[observed.Certificates, ...]


@dataclass(frozen=True, slots=True)
class WriteWebhooks:
    """Register the declared webhooks of a configuration with these caBundles, if it still has ``version``."""

    kind: str
    name: str
    version: str
    declared: observed.Declared
    bundles: tuple[observed.Certificates, ...]


Write = WriteAuthorities | WriteServing | WriteBundles | WriteWebhooks


def write_of(step: Step, state: observed.State, now: datetime, policy: RotationPolicy) -> Write:
    """Return the write of ``step``. New keys are made here."""
    match step:
        case SetBundles():
            target = _target(step, state)
            indices = tuple(hook.index for hook in target.hooks)
            return WriteBundles(target.kind, target.name, target.version, indices, step.bundles)
        case RegisterWebhooks():
            target = _target(step, state)
            if target.declared is None:
                raise ValueError(f"{target} declares no webhooks")
            return WriteWebhooks(target.kind, target.name, target.version, target.declared, step.bundles)
        case IssueLeaf():
            return _leaf(state, now, policy)
        case MakeAuthority():
            return WriteAuthorities(_with_next_ca(state, now, policy))
        case _:
            return WriteAuthorities(_noted(step, state.authorities, now))


def after(state: observed.State, write: Write) -> observed.State:
    """Return the state after ``write``, except for the new versions, and for endpoints that follow later."""
    match write:
        case WriteAuthorities():
            return replace(state, authorities=write.after)
        case WriteServing():
            return replace(state, serving=observed.Serving(write.version, write.leaf, write.authorities, ""))
        case WriteBundles() | WriteWebhooks():
            every = tuple(
                _written(one, write) if (one.kind, one.name) == (write.kind, write.name) else one
                for one in state.configurations
            )
            return replace(state, configurations=every)


def _with_next_ca(state: observed.State, now: datetime, policy: RotationPolicy) -> observed.Authorities:
    there = state.authorities
    # If the CA Secret was lost, caBundles and the serving Secret may have CAs that it lacks. Leaves of these are served
    # until the new CA's leaves are. So they are retired like any other authority, and dropped later.
    lost = () if there.current else (*filter(is_ours, state.serving.authorities), *observed.unknown_cas(state))
    retired = dict.fromkeys((*there.retired, *_certificates(there.next_ca), *lost))
    next_ca = make_authority(now, policy.authority_life, client=bool(policy.client))
    return replace(there, next_ca=next_ca, retired=tuple(retired), trusted=None, faults=())


def _noted(
    step: NoteTrusted | Promote | NoteServed | Forget, there: observed.Authorities, now: datetime
) -> observed.Authorities:
    match step:
        case NoteTrusted():
            return replace(there, trusted=_seen_since(there.next_ca, now))
        case Promote():
            retired = (*there.retired, *_certificates(there.current))
            return replace(there, current=there.next_ca, next_ca=None, retired=retired)
        case NoteServed():
            return replace(there, served=_seen_since(there.current, now))
        case Forget():
            return replace(there, retired=())


def _written(configuration: observed.Configuration, write: WriteBundles | WriteWebhooks) -> observed.Configuration:
    if isinstance(write, WriteWebhooks):
        configuration = replace(
            configuration, hooks=write.declared.hooks, declared=replace(write.declared, difference="")
        )
    hooks = zip(configuration.hooks, write.bundles, strict=True)
    return replace(configuration, hooks=tuple(replace(hook, bundle=bundle, faulty=False) for hook, bundle in hooks))


def _target(step: SetBundles | RegisterWebhooks, state: observed.State) -> observed.Configuration:
    [target] = [one for one in state.configurations if str(one) == step.configuration]
    return target


def _leaf(state: observed.State, now: datetime, policy: RotationPolicy) -> WriteServing:
    current = state.authorities.current
    if current is None:
        raise ValueError("there is no current CA to sign a leaf")
    leaf = (
        make_client(current, policy.client, now, policy.leaf_life)
        if policy.client
        else make_leaf(current, policy.names, now, policy.leaf_life)
    )
    return WriteServing(state.serving.version, leaf, (current.certificate,))


def _seen_since(authority: Signed | None, now: datetime) -> observed.SeenSince | None:
    return observed.SeenSince(observed.fingerprint(authority.certificate), now) if authority else None


def _certificates(authority: Signed | None) -> observed.Certificates:
    return (authority.certificate,) if authority else ()
