"""The steps of a certificate rotation, its decisions to wait or stop, and the write of each step."""

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from certs import state as observed
from vcuda.x509 import AUTHORITY_LIFE, LEAF_LIFE, Names, Signed, is_ours, make_authority, make_client, make_leaf

OVERLAP = timedelta(hours=1)
RETENTION = timedelta(days=1)

# A run of the rotation must observe a step's condition for this long before it takes the step. For example, API servers
# use a changed caBundle within about a second. The run measures this time with its monotonic clock, so a jump of the
# wall clock cannot shorten the time.
OBSERVATION = timedelta(seconds=10)

# This observation time replaces `OBSERVATION` in a rotation of client certificates. A webhook reads the client CAs from
# a mounted ConfigMap, and kubelet updates the mount within about 100 s.
CLIENT_OBSERVATION = timedelta(minutes=2)

# If an endpoint does not serve a new certificate after this time, the rotation reports a problem. kubelet updates a
# mounted Secret within about 100 s, at its next sync (60 s plus jitter) and from a cache that may be out of date.
PROPAGATION = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Commands:
    """The shell commands that messages recommend to the user."""

    restart: str = "kubectl -n vcuda-quota rollout restart deployment/vcuda-webhook"
    endpoints: str = "kubectl -n vcuda-quota get pods,endpointslices"
    dry_run: str = "vcuda-certs rotate --dry-run"
    allow: str = "kubectl edit clusterrole vcuda-certs"
    register: str = "kubectl label validatingwebhookconfiguration NAME app.kubernetes.io/part-of=vcuda-quota"
    replace: str = "kubectl -n vcuda-quota delete secret vcuda-webhook-ca vcuda-webhook-tls"


@dataclass(frozen=True, slots=True)
class RotationPolicy:
    """The settings of a rotation. An authority is a CA. A leaf is a certificate that an authority signed.

    ``names``: the names for which the serving certificate is issued.
    ``ca_life``, ``leaf_life``: how long a new CA or leaf is valid.
    ``overlap``: how long every caBundle must contain a new CA before an endpoint serves a leaf of this CA.
    ``retention``: how long a retired CA stays in the caBundles after an endpoint last served a leaf of this CA.
    ``issued_before``: certificates that were issued before this time are replaced, even if they are still valid.
    ``registered``: True if webhook configurations call the Service. If none does, the run reports a problem.
    ``client``: the common name of the client certificate that API servers present to the webhook. Empty if the rotation
    is of the webhook's serving certificate.
    ``installed``: True if the user states that all API servers present the client certificate in the Secret.
    ``registers_only``: True if another tool issues the certificates. A run then only registers webhooks.
    """

    names: Names
    ca_life: timedelta = AUTHORITY_LIFE
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
        """The word in messages for the programs that read the CAs: API servers or webhooks."""
        return "webhooks" if self.client else "API servers"

    def observation(self, span: timedelta) -> timedelta:
        """Return how long this run must itself observe a condition. ``span``: how long it must be true in all."""
        return min(CLIENT_OBSERVATION if self.client else OBSERVATION, span)


@dataclass(frozen=True, slots=True)
class SeenFor:
    """The times for which this run has observed three conditions without a break, by the monotonic clock.

    ``next_ca``: every writable caBundle contains the next CA.
    ``current``: every writable caBundle contains the current CA.
    ``served``: every endpoint serves a leaf (issued certificate) of the current CA.
    """

    next_ca: timedelta = timedelta()
    current: timedelta = timedelta()
    served: timedelta = timedelta()


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A step with its reason. The output of `vcuda-certs` shows the class name as the name of the step."""

    reason: str


class MakeAuthority(Reasoned):
    """A step: make the next CA, and store it in the CA Secret together with the current CA."""


@dataclass(frozen=True, slots=True)
class SetBundles:
    """A step: write the caBundles of a configuration, if its resourceVersion is still that of ``target``.

    ``bundles``: one caBundle for each webhook, in the same order.
    """

    target: observed.Configuration
    bundles: tuple[observed.Certificates, ...]
    reason: str

    @property
    def configuration(self) -> str:
        return str(self.target)


@dataclass(frozen=True, slots=True)
class RegisterWebhooks(SetBundles):
    """A step: register the webhooks that a configuration declares, and write their caBundles."""

    declared: observed.Declared


class NoteTrusted(Reasoned):
    """A step: record in the CA Secret that every writable caBundle contains the next CA from now on."""


class Promote(Reasoned):
    """A step: make the next CA the current CA, and retire the previous CA."""


class IssueLeaf(Reasoned):
    """A step: issue a new leaf (certificate) by the current CA, and write it into the serving Secret."""


class NoteServed(Reasoned):
    """A step: record in the CA Secret that every endpoint serves a certificate of the current CA from now on."""


class Forget(Reasoned):
    """A step: delete the retired CAs from the CA Secret. No caBundle contains them any more."""


Step = MakeAuthority | SetBundles | NoteTrusted | Promote | IssueLeaf | NoteServed | Forget


@dataclass(frozen=True, slots=True)
class Wait:
    """A decision: wait until the time ``until``. If ``until`` is None, wait until endpoints have changed."""

    reason: str
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class StepRejected:
    """A decision: stop the run, because a person must solve a problem first."""

    problems: tuple[observed.Problem, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """No step is due now."""

    until: datetime | None
    """The time of the next step; None if vcuda-certs has no certificate to renew."""
    reason: str = ""
    """The reason why no step is due. It is set if ``until`` is None."""


End = Wait | StepRejected | Done
"""The decisions with which a run may end. It ends with Wait if the next step is due after the run's time limit."""

Decision = Step | End


@dataclass(frozen=True, slots=True)
class WriteAuthorities:
    """A write: store ``after`` in the CA Secret, if the Secret's resourceVersion is still ``after.version``."""

    after: observed.Authorities


@dataclass(frozen=True, slots=True)
class WriteServing:
    """A write: store ``leaf`` in the serving Secret, if the Secret's resourceVersion is still ``version``."""

    version: str
    leaf: Signed
    authorities: observed.Certificates


Write = WriteAuthorities | WriteServing | SetBundles


def write_of(step: Step, state: observed.State, now: datetime, policy: RotationPolicy) -> Write:
    """Return the write that performs ``step``. If the step issues a certificate, make it here, with a new key."""
    there = state.authorities
    match step:
        case SetBundles():
            return step
        case IssueLeaf():
            return _leaf(state, now, policy)
        case MakeAuthority():
            return WriteAuthorities(_with_next_ca(state, now, policy))
        case NoteTrusted():
            after = replace(there, trusted=_seen_since(there.next_ca, now))
        case Promote():
            retired = (*there.retired, *observed.certificates_of(there.current))
            after = replace(there, current=there.next_ca, next_ca=None, retired=retired)
        case NoteServed():
            after = replace(there, served=_seen_since(there.current, now))
        case Forget():
            after = replace(there, retired=())
    return WriteAuthorities(after)


def after(state: observed.State, write: Write) -> observed.State:
    """Return ``state`` as it is after ``write``, for a dry run. resourceVersions and endpoints stay unchanged."""
    match write:
        case WriteAuthorities():
            return replace(state, authorities=write.after)
        case WriteServing():
            return replace(state, serving=observed.Serving(write.version, write.leaf, write.authorities, ""))
        case SetBundles():
            every = (_written(one, write) if str(one) == write.configuration else one for one in state.configurations)
            return replace(state, configurations=tuple(every))


def _with_next_ca(state: observed.State, now: datetime, policy: RotationPolicy) -> observed.Authorities:
    there = state.authorities
    # If the CA Secret was lost, the caBundles and the serving Secret may still contain the lost CAs. These CAs count as
    # retired, because endpoints serve leaves of the lost CAs for some time.
    lost = () if there.current else (*filter(is_ours, state.serving.authorities), *observed.unknown_cas(state))
    retired = dict.fromkeys((*there.retired, *observed.certificates_of(there.next_ca), *lost))
    next_ca = make_authority(now, policy.ca_life, client=bool(policy.client))
    return replace(there, next_ca=next_ca, retired=tuple(retired), trusted=None, faults=())


def _written(configuration: observed.Configuration, write: SetBundles) -> observed.Configuration:
    if isinstance(write, RegisterWebhooks):
        configuration = replace(
            configuration, hooks=write.declared.hooks, declared=replace(write.declared, difference="")
        )
    hooks = zip(configuration.hooks, write.bundles, strict=True)
    return replace(configuration, hooks=tuple(replace(hook, bundle=bundle, faulty=False) for hook, bundle in hooks))


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
