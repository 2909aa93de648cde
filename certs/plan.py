"""Decides the next step of a certificate rotation from the observed state. The functions do no I/O."""

from datetime import datetime, timedelta

from cryptography import x509

from certs import state as states, steps
from certs.steps import Decision, RotationPolicy, SeenFor
from vcuda.x509 import Signed, common_name, renewal_due, signed_by


def outdated(certificate: x509.Certificate, now: datetime, policy: RotationPolicy, name: str = "the leaf") -> str:
    """Return why the certificate must be replaced; empty if it may stay. ``name``: its name in the reason."""
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not states.is_valid(certificate, now):
        return f"{name} is valid only from {shown_utc(start)} to {shown_utc(end)}"
    # `issued_before` is ignored while it is in the future. Otherwise every new certificate would be replaced again.
    if policy.issued_before and states.issued(certificate) < policy.issued_before <= now:
        return f"{name} was issued before {shown_utc(policy.issued_before)}"
    if states.in_look_ahead(certificate, now):
        return f"{name} expires at {shown_utc(end)}, and less than a third of its life is left"
    return ""


def broken(state: states.State, now: datetime, policy: RotationPolicy) -> str:
    """Return why a webhook cannot use the certificate in the serving Secret now; empty if the certificate is usable."""
    leaf = state.serving.leaf
    if leaf is None:
        return state.serving.fault
    if not states.is_valid(leaf.certificate, now):
        return outdated(leaf.certificate, now, policy)
    if missing := states.names_of(policy.names) - states.names_of(leaf.certificate):
        return f"the leaf does not have the names {', '.join(sorted(missing))}"
    if policy.client and common_name(leaf.certificate) != policy.client:
        return f"the common name of the leaf is not {policy.client}"
    if not any(signed_by(leaf.certificate, authority) for authority in states.known(state)):
        return "the leaf was signed by a CA that is not in the CA Secret"
    return ""


def published(state: states.State, authority: Signed | None) -> bool:
    """Return True if every caBundle that vcuda-certs may write has the CA ``authority``; False if there is no CA."""
    unlocked = (one for one in state.configurations if not one.read_only)
    hooks = (hook for configuration in unlocked for hook in configuration.hooks)
    return authority is not None and all(authority.certificate in hook.bundle for hook in hooks)


def would_break(state: states.State, authority: Signed | None, now: datetime) -> bool:
    """Return True if calls that work now would fail when the webhook serves a certificate of CA ``authority``."""
    # Check only the caBundles that vcuda-certs must not write, and that do not contain `authority`. Calls work now if
    # the caBundle trusts a certificate that is served now or soon. If a dial failed, assume that they work now.
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
    """Return True if an endpoint is ready, and all ready or answering endpoints serve leaves of the current CA."""
    return bool(state.ready()) and not foreign(state, now)


def foreign(state: states.State, now: datetime) -> list[states.DialledEndpoint]:
    """Return the endpoints without a certificate of the current CA. Leave out unready endpoints that did not answer."""
    bundle = states.certificates_of(state.authorities.current)
    dialled = [endpoint for endpoint in state.endpoints if endpoint.ready or endpoint.leaf is not None]
    return [endpoint for endpoint in dialled if not states.trusts(bundle, endpoint.leaf, now)]


def may_work(state: states.State, now: datetime) -> bool:
    """Return True if calls may succeed: a caBundle trusts a ready endpoint, or the endpoint could not be dialled."""
    return any(
        endpoint.leaf is None or states.trusts(hook.bundle, endpoint.leaf, now)
        for endpoint in state.ready()
        for hook in state.hooks()
    )


def current_signs(state: states.State, now: datetime) -> bool:
    current = state.authorities.current
    return current is not None and states.is_valid(current.certificate, now)


def noted_since(state: states.State, now: datetime, *, served: bool) -> datetime | None:
    """Return a time that an earlier step of the rotation recorded in the CA Secret; None without a usable record.

    ``served``: if True, the time since which every endpoint serves a leaf of the current CA. If False, the time since
    which every writable caBundle contains the next CA.
    """
    there = state.authorities
    seen, authority = (there.served, there.current) if served else (there.trusted, there.next_ca)
    # A record has a CA and a time. If the record has another CA, it is from an earlier rotation. If its time is in the
    # future, it was written by a wrong clock. Both kinds of records are ignored.
    if (
        seen is None
        or authority is None
        or seen.fingerprint != states.fingerprint(authority.certificate)
        or seen.since > now
    ):
        return None
    return seen.since


def shown_utc(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


_UNCALLED = "no webhook configuration with the label of --selector calls the Service"
_UNANSWERED = "no replica serves a certificate of the CA in the serving Secret yet, so no webhook is registered"
_UNREGISTERED = (
    "the CA must be replaced, but this command cannot check whether the callers of the Service trust the next CA; "
    "delete both Secrets, so that the next run makes a new CA, and restart the callers after that run"
)


def plan(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision:
    """Return the next step of the certificate rotation, or the decision to wait, to stop or to end."""
    # A person must solve the problems in the observed state before the rotation writes anything.
    if state.problems:
        return steps.StepRejected(state.problems)
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
    # Step (a) of a rotation: make the next CA if the newest CA is unusable or due for renewal.
    next_ca, current = state.authorities.next_ca, state.authorities.current
    if next_ca is None and current is None:
        return steps.MakeAuthority("; ".join(state.authorities.faults) or "there is no CA")
    newest, name = (next_ca, "the next CA") if next_ca else (current, "the CA")
    reason = outdated(newest.certificate, now, policy, name) if newest else ""
    return steps.MakeAuthority(reason) if reason else None


def _bundles(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # Step (b) of a rotation: add to every writable caBundle each CA whose leaves may be served. Step (e): remove a
    # retired CA when no endpoint has served its leaves for the retention time. Until then, step (b) adds no
    # retired CA. Otherwise, if two runs overlap, one could add again the retired CA that the other has removed.
    retired = frozenset((*state.authorities.retired, *states.unknown_cas(state)))
    needed = _unserved(state, now, policy) is not None
    unwanted = retired if not needed and _retained(state, now, policy, seen) is None else frozenset()
    wanted = tuple(one for one in states.known(state) if states.is_valid(one, now) and (needed or one not in retired))
    reason = (
        "the caBundle no longer needs the retired CA"
        if unwanted
        else "the caBundle must contain every CA whose leaves may be served"
    )
    for configuration in (one for one in state.configurations if not one.read_only):
        bundles = tuple(_bundle(hook.bundle, wanted, unwanted) for hook in configuration.hooks)
        if any(hook.faulty for hook in configuration.hooks) or bundles != configuration.bundles():
            return steps.SetBundles(configuration, bundles, reason)
    return None


def _bundle(
    present: states.Certificates, wanted: states.Certificates, unwanted: frozenset[x509.Certificate]
) -> states.Certificates:
    kept = tuple(one for one in present if one not in unwanted)
    return (*kept, *(one for one in wanted if one not in kept))


def _broken_leaf(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # An unusable serving Secret is repaired immediately. The current CA signs the new leaf, because the caBundles
    # contain the current CA.
    reason = broken(state, now, policy)
    if not reason or not current_signs(state, now):
        return None
    if would_break(state, state.authorities.current, now):
        return steps.StepRejected(state.read_only())
    return _observing(state, now, policy, seen.current) or steps.IssueLeaf(reason)


def _registration(state: states.State, now: datetime) -> Decision | None:
    # The declared webhooks are registered only after a replica has answered, because without a replica they would block
    # every GPU pod. They are registered again if the registered webhooks differ from the declared webhooks. Mutating
    # webhooks come first, because the validating webhook rejects pods that no mutating webhook has changed. The
    # caBundles also get the CAs in the serving Secret, because the CA of another tool is only there.
    every = dict.fromkeys((*states.known(state), *state.serving.authorities))
    trusted = tuple(one for one in every if states.is_valid(one, now))
    if not any(states.trusts(trusted, endpoint.leaf, now) for endpoint in state.ready()):
        return None
    for configuration, declared in _unregistered(state):
        bundles = tuple(_bundle(hook.bundle, trusted, frozenset()) for hook in declared.hooks)
        return steps.RegisterWebhooks(configuration, bundles, declared.difference, declared)
    return None


def _unregistered(state: states.State) -> list[tuple[states.Configuration, states.Declared]]:
    writable = ((one, one.declared) for one in state.configurations if not one.read_only)
    return [(one, declared) for one, declared in writable if declared and declared.difference]


def _end_of_registration(state: states.State) -> steps.End:
    # Problems with the certificates are not reported here, because another tool issues the certificates.
    if state.read_only():
        return steps.StepRejected(state.read_only())
    if _unregistered(state):
        return steps.Wait(_UNANSWERED)
    return steps.Done(None, "all declared webhooks are registered" if state.declares() else "no webhook is declared")


def _takeover(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # Step (c) of a rotation: make the next CA the current CA. While this step waits, renew a leaf that is due.
    decision = _promotion(state, now, policy, seen)
    if isinstance(decision, steps.Wait | steps.StepRejected):
        return _ageing_leaf(state, now, policy, seen) or decision
    return decision


def _promotion(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # The next CA becomes the current CA after every writable caBundle has contained the next CA for the overlap time.
    if state.authorities.next_ca is None:
        return None
    if would_break(state, state.authorities.next_ca, now):
        return steps.StepRejected(state.read_only())
    if reason := broken(state, now, policy):
        return _observing(state, now, policy, seen.next_ca) or steps.Promote(
            f"the serving Secret is unusable, so a wait would not help: {reason}"
        )
    if problem := _untrusting(state, policy):
        return steps.StepRejected((problem,))
    since = noted_since(state, now, served=False)
    if since is None:
        return steps.NoteTrusted("every caBundle contains the next CA")
    reason = f"the {policy.readers} are given time to trust the next CA (--overlap)"
    return _lasting(
        since + policy.overlap, policy.observation(policy.overlap) - seen.next_ca, now, reason
    ) or steps.Promote("every caBundle has contained the next CA for the time of --overlap")


def _untrusting(state: states.State, policy: RotationPolicy) -> states.Problem | None:
    if not policy.registered:
        return states.Problem(_UNREGISTERED, policy.commands.replace)
    if not state.declares() and not any(state.hooks()):
        return states.Problem(
            f"{_UNCALLED}, so no caBundle can get the next CA{_elsewhere(state)}", policy.commands.register
        )
    return None


def _ageing_leaf(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # If the leaf (serving certificate) is due for renewal, the current CA signs a new leaf. The new leaf must expire
    # later than the old leaf, and clients must trust the new leaf.
    leaf, current = state.serving.leaf, state.authorities.current
    if leaf is None or current is None or not states.in_look_ahead(leaf.certificate, now):
        return None
    trusted = signed_by(leaf.certificate, current.certificate) or not would_break(state, current, now)
    if not current_signs(state, now) or not trusted or current.expires <= leaf.expires:
        return None
    return _observing(state, now, policy, seen.current) or steps.IssueLeaf(outdated(leaf.certificate, now, policy))


def _due_leaf(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # Replace the leaf (serving certificate) if its renewal is due, or if the current CA did not sign it.
    leaf, current = state.serving.leaf, state.authorities.current
    if leaf is None or current is None:
        return None
    of_another = not signed_by(leaf.certificate, current.certificate)
    reason = "the leaf was signed by the previous CA" if of_another else outdated(leaf.certificate, now, policy)
    if not reason:
        return None
    return _observing(state, now, policy, seen.current) or steps.IssueLeaf(reason)


def _propagation(state: states.State, now: datetime, policy: RotationPolicy) -> Decision | None:
    # Step (d) of a rotation: wait until every ready endpoint serves the certificate in the serving Secret.
    leaf = state.serving.leaf
    lagging = [endpoint for endpoint in state.ready() if leaf is None or endpoint.leaf != leaf.certificate]
    return _lag([f"{one.address}: {one.fault or 'serves an earlier leaf'}" for one in lagging], state, now, policy)


def _retirement(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> Decision | None:
    # Step (e) of a rotation: delete the retired CAs from the CA Secret, when no caBundle contains them any more.
    retired = state.authorities.retired
    if not retired and not states.unknown_cas(state):
        return None
    if waiting := _unserved(state, now, policy) or _retained(state, now, policy, seen):
        return waiting
    held = any(one in hook.bundle for hook in state.hooks() for one in retired)
    return steps.Forget("no caBundle contains the retired CA") if retired and not held else None


def _unserved(state: states.State, now: datetime, policy: RotationPolicy) -> Decision | None:
    # A retired CA may be removed only if every endpoint serves a leaf of the current CA, and the CA Secret records the
    # time at which this began. If one of both is missing, return the next step towards it; otherwise None.
    leaf, current = state.serving.leaf, state.authorities.current
    if leaf is None or current is None or not signed_by(leaf.certificate, current.certificate):
        return steps.Wait("the serving Secret has no leaf of the current CA yet")
    if not state.ready():
        text = "no endpoint is ready to serve the new leaf, so the old CA stays in the caBundles"
        return steps.StepRejected((states.Problem(text, policy.commands.endpoints),))
    if not served_everywhere(state, now):
        return _lag([f"{one.address}: serves a leaf of another CA" for one in foreign(state, now)], state, now, policy)
    noted = noted_since(state, now, served=True)
    if policy.client and (until := _presented_until(state, now, policy, noted=noted is not None)):
        return steps.Wait(
            "an API server that lacks the new certificate may present a certificate of the retired CA", until
        )
    if noted is None:
        return steps.NoteServed("every endpoint serves a leaf of the current CA")
    return None


def _presented_until(state: states.State, now: datetime, policy: RotationPolicy, *, noted: bool) -> datetime | None:
    # Return the time until which an API server may present a client certificate of a retired CA; None if no API server
    # can. This program cannot see the certificate that an API server presents. So a retired CA stays until it expires,
    # or until the user states by --installed that all API servers present the new certificate. `noted`: the CA Secret
    # records this statement for the retired CAs in it. The record does not apply to a CA that only the ConfigMap
    # contains.
    if policy.installed:
        return None
    possible = (*states.unknown_cas(state), *(() if noted else state.authorities.retired))
    return max((one.not_valid_after_utc for one in possible if states.is_valid(one, now)), default=None)


def _retained(state: states.State, now: datetime, policy: RotationPolicy, seen: SeenFor) -> steps.Wait | None:
    since = noted_since(state, now, served=True) or now
    left = policy.observation(policy.retention) - seen.served
    return _lasting(since + policy.retention, left, now, "the retired CA stays trusted for the time of --retention")


def _lag(lagging: list[str], state: states.State, now: datetime, policy: RotationPolicy) -> Decision | None:
    # Wait until the endpoints serve the new certificate. After 10 minutes (PROPAGATION), report those that do not.
    if not lagging or state.serving.leaf is None:
        return None
    made = states.issued(state.serving.leaf.certificate)
    if now - made < steps.PROPAGATION:
        return steps.Wait(f"not every endpoint serves the new leaf yet ({'; '.join(lagging)})")
    text = f"not every endpoint serves the leaf that was issued at {shown_utc(made)} ({'; '.join(lagging)})"
    return steps.StepRejected((states.Problem(text, policy.commands.restart),))


def _observing(state: states.State, now: datetime, policy: RotationPolicy, seen: timedelta) -> steps.Wait | None:
    # If a caBundle may have changed a moment ago, wait until the API servers have surely read its new value.
    left = policy.observation(policy.overlap) - seen
    return (
        steps.Wait(f"the {policy.readers} are given a moment to read the caBundles", now + left)
        if left > timedelta() and may_work(state, now)
        else None
    )


def _lasting(due: datetime, left: timedelta, now: datetime, reason: str) -> steps.Wait | None:
    # Wait until `due`, but at least for `left`: the run must observe the condition of its next step for this time.
    until = max(due, now + left)
    return steps.Wait(reason, until) if until > now else None


def _elsewhere(state: states.State) -> str:
    return f" ({'; '.join(state.left_alone)})" if state.left_alone else ""


def _end(state: states.State, now: datetime, policy: RotationPolicy) -> steps.End:
    if problems := (*idle(state, now, policy), *state.read_only()):
        return steps.StepRejected(problems)
    return steps.Wait(_UNANSWERED) if _unregistered(state) else steps.Done(_next_due(state))


def idle(state: states.State, now: datetime, policy: RotationPolicy) -> tuple[states.Problem, ...]:
    """Return the problems that make every call of the webhook fail although the certificates are correct.

    For 10 minutes after a leaf (serving certificate) was issued, return none: pods that waited for it may be starting.
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
    return min((renewal_due(states.issued(one), one.not_valid_after_utc) for one in ours), default=None)
