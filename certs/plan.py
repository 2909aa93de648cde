"""Decides the next step of a rotation from the state. Pure: without I/O or a clock."""

from datetime import datetime, timedelta

from cryptography import x509

from certs import state as states, steps
from certs.steps import Decision, RotationPolicy, SeenFor
from vcuda.x509 import Signed, common_name


def outdated(certificate: x509.Certificate, now: datetime, policy: RotationPolicy) -> str:
    """Return why the certificate must be replaced; empty if it need not be."""
    if not states.is_valid(certificate, now):
        return f"is valid from {shown(certificate.not_valid_before_utc)} to {shown(certificate.not_valid_after_utc)}"
    # An `issued_before` in the future is ignored, because new certificates would be replaced again and again.
    if policy.issued_before and states.issued(certificate) < policy.issued_before <= now:
        return f"was issued before {shown(policy.issued_before)}"
    if states.in_look_ahead(certificate, now):
        return f"has less than a third of its life left, until {shown(certificate.not_valid_after_utc)}"
    return ""


def broken(state: states.State, now: datetime, policy: RotationPolicy) -> str:
    """Return why a webhook cannot use the serving Secret now; empty if it can."""
    leaf = state.serving.leaf
    if leaf is None:
        return state.serving.fault
    if not states.is_valid(leaf.certificate, now):
        return f"the leaf {outdated(leaf.certificate, now, policy)}"
    if missing := states.names_of(policy.names) - states.names_of(leaf.certificate):
        return f"the leaf is not for {', '.join(sorted(missing))}"
    if policy.client and common_name(leaf.certificate) != policy.client:
        return f"the leaf is not of the name {policy.client}"
    if not any(states.signed_by(leaf.certificate, authority) for authority in states.known(state)):
        return "the leaf is of a CA that is not known here"
    return ""


def published(state: states.State, authority: Signed | None) -> bool:
    """Whether every caBundle that may be written has ``authority``."""
    unlocked = (one for one in state.configurations if not one.read_only)
    hooks = (hook for configuration in unlocked for hook in configuration.hooks)
    return authority is not None and all(authority.certificate in hook.bundle for hook in hooks)


def would_break(state: states.State, authority: Signed | None, now: datetime) -> bool:
    """Whether calls by a read-only configuration that succeed now would fail if ``authority`` signed."""
    # Such a configuration trusts a leaf that is served now or soon, and does not trust the authority. An endpoint that
    # cannot be dialled may serve a trusted leaf.
    if authority is None:
        return False
    leaf = state.serving.leaf
    leaves = [endpoint.leaf for endpoint in state.endpoints if endpoint.leaf] + ([leaf.certificate] if leaf else [])
    silent = any(endpoint.leaf is None for endpoint in state.ready())
    read_only = (
        hook for configuration in state.configurations if configuration.read_only for hook in configuration.hooks
    )
    without = [hook.bundle for hook in read_only if authority.certificate not in hook.bundle]
    return any((silent and bundle) or any(states.trusts(bundle, one, now) for one in leaves) for bundle in without)


def served_everywhere(state: states.State, now: datetime) -> bool:
    """Whether some endpoint is ready, and all show a leaf of the current authority."""
    return bool(state.ready()) and not others(state, now)


def others(state: states.State, now: datetime) -> list[states.DialledEndpoint]:
    """The endpoints without a leaf of the current authority. An endpoint that is not ready counts if it answers."""
    current = state.authorities.current
    bundle = (current.certificate,) if current else ()
    asked = [endpoint for endpoint in state.endpoints if endpoint.ready or endpoint.leaf is not None]
    return [endpoint for endpoint in asked if not states.trusts(bundle, endpoint.leaf, now)]


def may_work(state: states.State, now: datetime) -> bool:
    """Whether a call may succeed: a caBundle trusts the leaf of a ready endpoint, or an endpoint cannot be dialled."""
    return any(
        endpoint.leaf is None or states.trusts(hook.bundle, endpoint.leaf, now)
        for endpoint in state.ready()
        for hook in state.hooks()
    )


def current_signs(state: states.State, now: datetime) -> bool:
    current = state.authorities.current
    return current is not None and states.is_valid(current.certificate, now)


def noted_since(state: states.State, now: datetime, *, served: bool) -> datetime | None:
    """Since when the current authority is served everywhere, or the next one trusted everywhere, by the Secret."""
    there = state.authorities
    seen, authority = (there.served, there.current) if served else (there.trusted, there.next_ca)
    # A note on another authority is from the previous rotation. A time in the future is from a wrong clock, and is
    # ignored.
    if (
        seen is None
        or authority is None
        or seen.fingerprint != states.fingerprint(authority.certificate)
        or seen.since > now
    ):
        return None
    return seen.since


def shown(moment: datetime) -> str:
    """Return the moment as text for people, in UTC."""
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


_UNCALLED = "no webhook configuration with our label calls the Service"
_UNANSWERED = "no replica serves a certificate of the CA in the serving Secret yet, so no webhook is registered"
_UNREGISTERED = (
    "the CA has to be replaced, and whoever calls the Service has to be given the next one, which nobody can tell from "
    "here: delete both Secrets to have it replaced by the next run, and restart the callers then"
)


def plan(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision:
    """Return the next step: the first of these that applies. They are in the order of the steps."""
    # These problems need a person, and nothing is written until they are solved. With a wrong clock, or a Secret of
    # another owner, every step below would be a mistake.
    if state.problems:
        return steps.StepRefused(state.problems)
    if state.tool or policy.registers_only:
        return _registration(state, now) or _end_of_registration(state)
    return (
        _authority(state, now, policy)
        or _bundles(state, now, policy, seen)
        or _broken_leaf(state, now, policy, seen)
        or _registration(state, now)
        or _takeover(state, now, policy, seen)
        or _due_leaf(state, now, policy, seen)
        or _propagation(state, now, policy)
        or _retirement(state, now, policy, seen)
        or _end(state, now, policy)
    )


def _authority(state: states.State, now: datetime, policy: RotationPolicy) -> Decision | None:
    # (a) Make the next authority if the current one is unusable, or has less than its look-ahead left.
    next_ca, current = state.authorities.next_ca, state.authorities.current
    if next_ca is None and current is None:
        return steps.MakeAuthority("; ".join(state.authorities.faults) or "there is no CA")
    newest, which = (next_ca, "the next CA") if next_ca else (current, "the CA")
    reason = outdated(newest.certificate, now, policy) if newest else ""
    return steps.MakeAuthority(f"{which} {reason}") if reason else None


def _bundles(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # (b) Put every authority whose leaves may be served into every caBundle. (e) Remove retired ones when none is
    # served. Retired authorities whose leaves are no longer served are not put back where they are missing. Otherwise
    # two runs, of which one has waited longer, or was killed while it removed them, would undo each other's work.
    retired = frozenset((*state.authorities.retired, *states.unknown_cas(state)))
    needed = _unserved(state, now, policy) is not None
    unwanted = retired if not needed and _retained(state, now, policy, seen) is None else frozenset()
    wanted = tuple(one for one in states.known(state) if states.is_valid(one, now) and (needed or one not in retired))
    reason = "it need not trust the retired CA any more" if unwanted else "it has to trust every CA that may be served"
    for configuration in (one for one in state.configurations if not one.read_only):
        bundles = tuple(_bundle(hook.bundle, wanted, unwanted) for hook in configuration.hooks)
        if any(hook.faulty for hook in configuration.hooks) or bundles != configuration.bundles():
            return steps.SetBundles(str(configuration), bundles, reason)
    return None


def _bundle(
    present: states.Certificates, wanted: states.Certificates, unwanted: frozenset[x509.Certificate]
) -> states.Certificates:
    # The present certificates without the unwanted ones, then the missing ones. Certificates of others stay.
    kept = tuple(one for one in present if one not in unwanted)
    return (*kept, *(one for one in wanted if one not in kept))


def _broken_leaf(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # An unusable serving Secret is repaired at once, by the current authority, which has had its overlap.
    reason = broken(state, now, policy)
    if not reason or not current_signs(state, now):
        return None
    if would_break(state, state.authorities.current, now):
        return steps.StepRefused(state.read_only())
    return _settling(state, now, policy, seen.current) or steps.IssueLeaf(reason)


def _registration(state: states.State, now: datetime) -> Decision | None:
    # Register the declared webhooks once a replica answers, and again when they differ. Before that the API server
    # would reject every pod that it asks about. The mutating webhooks come first: a pod that only they have seen is
    # admitted, while a pod that only the validating ones have seen is rejected.
    # Another tool's CA is in the serving Secret alone. Of ours that Secret has the current one.
    every = dict.fromkeys((*states.known(state), *state.serving.authorities))
    trusted = tuple(one for one in every if states.is_valid(one, now))
    if not any(states.trusts(trusted, endpoint.leaf, now) for endpoint in state.ready()):
        return None
    for configuration, declared in _unregistered(state):
        bundles = tuple(_bundle(hook.bundle, trusted, frozenset()) for hook in declared.hooks)
        return steps.RegisterWebhooks(str(configuration), bundles, declared.difference)
    return None


def _unregistered(state: states.State) -> list[tuple[states.Configuration, states.Declared]]:
    writable = ((one, one.declared) for one in state.configurations if not one.read_only)
    return [(one, declared) for one, declared in writable if declared and declared.difference]


def _end_of_registration(state: states.State) -> steps.End:
    # The certificates are another tool's, and so are their problems.
    if state.read_only():
        return steps.StepRefused(state.read_only())
    if _unregistered(state):
        return steps.Wait(_UNANSWERED)
    return steps.Done(None, "all declared webhooks are registered" if state.declares() else "nothing here is ours")


def _takeover(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # (c) The next authority becomes the current one. While it waits for that, a leaf in its look-ahead is renewed.
    decision = _promotion(state, now, policy, seen)
    if isinstance(decision, steps.Wait | steps.StepRefused):
        return _ageing_leaf(state, now, policy, seen) or decision
    return decision


def _promotion(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # The next authority signs after it has been trusted everywhere for the overlap.
    if state.authorities.next_ca is None:
        return None
    if would_break(state, state.authorities.next_ca, now):
        return steps.StepRefused(state.read_only())
    if reason := broken(state, now, policy):
        return _settling(state, now, policy, seen.next_ca) or steps.Promote(f"nothing is gained by waiting: {reason}")
    if problem := _untrusting(state, policy):
        return steps.StepRefused((problem,))
    since = noted_since(state, now, served=False)
    if since is None:
        return steps.NoteTrusted("every caBundle was read back and has the next CA")
    reason = f"the {policy.readers} are given time to trust the next CA"
    return _lasting(since + policy.overlap, policy.settle(policy.overlap) - seen.next_ca, now, reason) or steps.Promote(
        "every caBundle has had the next CA for the overlap"
    )


def _untrusting(state: states.State, policy: RotationPolicy) -> states.Problem | None:
    if not policy.registered:
        return states.Problem(_UNREGISTERED, policy.commands.replace)
    if not state.declares() and not any(state.hooks()):
        return states.Problem(
            f"{_UNCALLED}, so none could trust the next CA{_elsewhere(state)}", policy.commands.register
        )
    return None


def _ageing_leaf(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # The current authority renews a leaf in its look-ahead if that gains time and no client trusts the new leaf less.
    leaf, current = state.serving.leaf, state.authorities.current
    if leaf is None or current is None or not states.in_look_ahead(leaf.certificate, now):
        return None
    trusted = states.signed_by(leaf.certificate, current.certificate) or not would_break(state, current, now)
    if not current_signs(state, now) or not trusted or current.expires <= leaf.expires:
        return None
    return _settling(state, now, policy, seen.current) or steps.IssueLeaf(
        f"the leaf {outdated(leaf.certificate, now, policy)}"
    )


def _due_leaf(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # A leaf is renewed in time, and after a change of the authority. The previous authority stays trusted.
    leaf, current = state.serving.leaf, state.authorities.current
    if leaf is None or current is None:
        return None
    of_another = not states.signed_by(leaf.certificate, current.certificate)
    reason = "is of the CA before" if of_another else outdated(leaf.certificate, now, policy)
    if not reason:
        return None
    return _settling(state, now, policy, seen.current) or steps.IssueLeaf(f"the leaf {reason}")


def _propagation(state: states.State, now: datetime, policy: RotationPolicy) -> Decision | None:
    # (d) Every ready endpoint must serve the leaf in the Secret, which is checked by dialling it.
    leaf = state.serving.leaf
    lagging = [endpoint for endpoint in state.ready() if leaf is None or endpoint.leaf != leaf.certificate]
    return _lag([f"{one.address}: {one.fault or 'an earlier leaf'}" for one in lagging], state, now, policy)


def _retirement(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # (e) Delete a retired authority, which `_bundles` has just found in no caBundle.
    retired = state.authorities.retired
    if not retired and not states.unknown_cas(state):
        return None
    if waiting := _unserved(state, now, policy) or _retained(state, now, policy, seen):
        return waiting
    held = any(one in hook.bundle for hook in state.hooks() for one in retired)
    return steps.Forget("no caBundle has the retired CA any more") if retired and not held else None


def _unserved(state: states.State, now: datetime, policy: RotationPolicy) -> Decision | None:
    # The step that is missing before every endpoint is known to serve a leaf of the current authority; None if none is.
    leaf, current = state.serving.leaf, state.authorities.current
    if leaf is None or current is None or not states.signed_by(leaf.certificate, current.certificate):
        return steps.Wait("there is no leaf of the current CA yet")
    if not state.ready():
        text = "no endpoint is ready, so none has shown the new leaf, and the old CA stays trusted"
        return steps.StepRefused((states.Problem(text, policy.commands.endpoints),))
    if not served_everywhere(state, now):
        return _lag([f"{one.address}: not a leaf of the current CA" for one in others(state, now)], state, now, policy)
    noted = noted_since(state, now, served=True)
    if policy.client and (until := _presented_until(state, now, policy, noted=noted is not None)):
        return steps.Wait("an API server that has not been given the new pair may present one of the retired CA", until)
    if noted is None:
        return steps.NoteServed("every endpoint was dialled and shows a leaf of the current CA")
    return None


def _presented_until(state: states.State, now: datetime, policy: RotationPolicy, *, noted: bool) -> datetime | None:
    # The certificate that an API server presents cannot be asked for. So a retired CA stays until none of its leaves
    # can be valid, or until a person states that all API servers present the new pair, which is recorded. An authority
    # that only the ConfigMap has may be newer than that record.
    if policy.installed:
        return None
    possible = (*states.unknown_cas(state), *(() if noted else state.authorities.retired))
    return max((one.not_valid_after_utc for one in possible if states.is_valid(one, now)), default=None)


def _retained(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> steps.Wait | None:
    since = noted_since(state, now, served=True) or now
    left = policy.settle(policy.retention) - seen.served
    return _lasting(since + policy.retention, left, now, "the retired CA stays trusted for its retention")


def _lag(told: list[str], state: states.State, now: datetime, policy: RotationPolicy) -> Decision | None:
    # Wait for endpoints that do not serve the new leaf. An endpoint that takes longer than kubelet may needs a person.
    if not told or state.serving.leaf is None:
        return None
    made = states.issued(state.serving.leaf.certificate)
    if now - made < steps.PROPAGATION:
        return steps.Wait(f"not every endpoint serves the new leaf yet ({'; '.join(told)})")
    text = f"not every endpoint serves the leaf of {shown(made)} ({'; '.join(told)})"
    return steps.StepRefused((states.Problem(text, policy.commands.restart),))


def _settling(state: states.State, now: datetime, policy: RotationPolicy, seen: timedelta) -> steps.Wait | None:
    # Give the API servers a moment, because this run, or a person, may have just changed a caBundle.
    left = policy.settle(policy.overlap) - seen
    return (
        steps.Wait(f"the {policy.readers} are given a moment to read the caBundles", now + left)
        if left > timedelta() and may_work(state, now)
        else None
    )


def _lasting(due: datetime, left: timedelta, now: datetime, reason: str) -> steps.Wait | None:
    # Wait until the step is due by the wall clock, and until this run itself has seen the condition for a moment.
    until = max(due, now + left)
    return steps.Wait(reason, until) if until > now else None


def _elsewhere(state: states.State) -> str:
    return f" ({'; '.join(state.left_alone)})" if state.left_alone else ""


def _end(state: states.State, now: datetime, policy: RotationPolicy) -> steps.End:
    # All is done, except for problems that need a person, and for missing configurations or endpoints.
    if problems := (*idle(state, now, policy), *state.read_only()):
        return steps.StepRefused(problems)
    return steps.Wait(_UNANSWERED) if _unregistered(state) else steps.Done(_next_due(state))


def idle(state: states.State, now: datetime, policy: RotationPolicy) -> tuple[states.Problem, ...]:
    """Return the problems that a person must solve before a call can succeed, although the certificates are correct.

    A fresh leaf may be the first one, which the webhook waits for before it starts. So the webhook is given some time.
    """
    leaf = state.serving.leaf
    if leaf and now - states.issued(leaf.certificate) < steps.PROPAGATION:
        return ()
    uncalled = states.Problem(f"{_UNCALLED}{_elsewhere(state)}", policy.commands.register)
    unanswered = states.Problem("no endpoint is ready, so no call is answered", policy.commands.endpoints)
    called = any(state.hooks()) or state.declares()
    found = ((uncalled, policy.registered and not called), (unanswered, not state.ready()))
    return tuple(problem for problem, there in found if there)


def _next_due(state: states.State) -> datetime | None:
    ours = [one.certificate for one in (state.serving.leaf, state.authorities.current) if one]
    return min(
        (one.not_valid_after_utc - (one.not_valid_after_utc - states.issued(one)) / 3 for one in ours), default=None
    )
