"""The report of `vcuda-certs status`: all certificates, whether webhook calls are trusted, and the open problems."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec
from cryptography import x509

from certs import parsing, state as observed, steps
from certs.plan import broken, idle, plan, shown_utc
from vcuda.cli import aligned, whole_units

_UNTRUSTED = "the caBundle does not trust the leaf that is served"
_PERHAPS = "an intermediate CA may be between the caBundle and the leaf that is served"
# A rotation takes a step only after it has observed the necessary condition for some time. A report reads the state
# only once, so it assumes that this time has passed. Otherwise each report would say that the next step is to wait.
_FOREVER = steps.SeenFor(*[timedelta(days=36500)] * 3)


class CertificateRow(msgspec.Struct, frozen=True, rename="camel"):
    """One certificate in one place, such as a Secret.

    ``days_left``: the whole days until the certificate expires. ``time_left``: the same for people, in words.
    """

    certificate: str
    where: str
    expires: datetime
    days_left: int
    time_left: str
    note: str


@dataclass(frozen=True, slots=True)
class WebhookCall:
    """The result of one check: does the API server, when it calls a webhook, trust the certificate of an endpoint?

    ``trusted``: True if the API server accepts the certificate; None if vcuda-certs cannot check this.
    ``fault``: why ``trusted`` is not True; empty if ``trusted`` is True.
    """

    webhook: str
    endpoint: str
    trusted: bool | None
    fault: str = ""


class Report(msgspec.Struct, frozen=True, rename={"rows": "certificates", "next_step": "next"}):
    """The report of `vcuda-certs status`. ``next_step``: the first step that the next rotation will take."""

    rows: tuple[CertificateRow, ...]
    calls: tuple[WebhookCall, ...]
    notes: tuple[str, ...]
    next_step: str
    problems: tuple[observed.Problem, ...]


def report_on(
    state: observed.State,
    refs: parsing.ObjectRefs,
    now: datetime,
    policy: steps.RotationPolicy,
    rotate: str,
    *,
    job: str = "",
) -> Report:
    """Return the report on ``state``. ``rotate``: the command to recommend if a rotation is overdue.

    ``job``: the name of a Job that runs a rotation now; empty if there is none. A step that this Job has yet to
    take is not reported as a problem.
    """
    decision = plan(state, now, policy, _FOREVER)
    calls = tuple(_call(hook, endpoint, now) for hook in state.hooks() for endpoint in state.ready())
    failing = [call for call in calls if call.trusted is False]
    if isinstance(decision, steps.StepRejected):
        problems = decision.problems
    elif isinstance(decision, steps.Done | steps.Wait):
        command = f"kubectl -n {refs.namespace} describe secret {refs.serving_secret}"
        # No step of the rotation is due, so the rotation cannot repair the webhook calls that fail now. So these calls
        # are reported as problems.
        texts = sorted({f"{call.webhook}: {call.endpoint}: {call.fault}" for call in failing})
        problems = tuple(observed.Problem(text, command if state.tool else policy.commands.restart) for text in texts)
    else:
        unregistered = (
            f"{decision.configuration}: {decision.reason}" if isinstance(decision, steps.RegisterWebhooks) else ""
        )
        texts = [*sorted({call.fault for call in failing}), *filter(None, (_late(state, now, policy), unregistered))]
        undone = "the last rotation did not run or did not finish"
        problems = () if job else tuple(observed.Problem(f"{undone}: {text}", rotate) for text in texts)
    notices = (*state.read_only(), *(idle(state, now, policy) if state.tool else ()))
    rows = tuple(_rows(state, refs, now))
    every = tuple(dict.fromkeys((*problems, *notices)))
    return Report(rows, calls, (*_notes(state, policy), *_running(refs, job)), _next_step(decision), every)


def certificate_table(report: Report) -> str:
    certificates: list[tuple[str, ...]] = [("CERTIFICATE", "PLACE", "EXPIRES", "TIME LEFT", "NOTE")]
    certificates += [(r.certificate, r.where, shown_utc(r.expires), r.time_left, r.note) for r in report.rows]
    answers = {True: "yes", False: "no: {}", None: "cannot tell: {}"}
    calls: list[tuple[str, ...]] = [("WEBHOOK", "ENDPOINT", "TRUSTED")]
    calls += [(call.webhook, call.endpoint, answers[call.trusted].format(call.fault)) for call in report.calls]
    tables = [certificates, calls] if report.calls else [certificates]
    parts = ["\n".join(aligned(cells)) for cells in tables]
    parts += [*report.notes, f"Next: {report.next_step}"]
    parts += [f"Needs a person: {problem}" for problem in report.problems]
    return "\n\n".join(parts)


def document(report: Report) -> str:
    problems = [{"problem": problem.text, "command": problem.command} for problem in report.problems]
    return json.dumps({**msgspec.to_builtins(report), "problems": problems}, indent=2)


def _rows(state: observed.State, refs: parsing.ObjectRefs, now: datetime) -> Iterator[CertificateRow]:
    secret, there = f"secret/{refs.authority_secret}", state.authorities
    yield from _row(observed.certificates_of(there.current), secret, now, "signs the leaves")
    yield from _row(observed.certificates_of(there.next_ca), secret, now, "will sign the next leaves")
    yield from _row(there.retired, secret, now, "retired")
    yield from _row(
        observed.certificates_of(state.serving.leaf), f"secret/{refs.serving_secret}", now, state.serving.fault
    )
    for configuration in state.configurations:
        names: dict[observed.Certificates, list[str]] = {}
        for hook in configuration.hooks:
            names.setdefault(hook.bundle, []).append(hook.name)
        for bundle, of_these in names.items():
            yield from _row(bundle, str(configuration), now, f"caBundle of {', '.join(of_these)}")
    for endpoint in state.endpoints:
        found = (endpoint.leaf,) if endpoint.leaf else ()
        yield from _row(found, endpoint.address, now, "served" if endpoint.ready else "served, not ready")


def _row(certificates: Iterable[x509.Certificate], where: str, now: datetime, note: str) -> Iterator[CertificateRow]:
    for one in certificates:
        end = one.not_valid_after_utc
        left = whole_units(end - now) if end > now else f"expired {whole_units(now - end)} ago"
        yield CertificateRow(_short(one), where, end, (end - now).days, left, note)


def _short(certificate: x509.Certificate) -> str:
    try:
        common = ", ".join(str(part.value) for part in certificate.subject) or "(no subject)"
    except ValueError:
        common = "(an unreadable subject)"
    return f"{common} [{observed.fingerprint(certificate)[:8]}]"


def _call(hook: observed.Hook, endpoint: observed.DialledEndpoint, now: datetime) -> WebhookCall:
    fault = endpoint.fault or _fault(hook, endpoint.leaf, now)
    if fault == _UNTRUSTED and endpoint.leaf and observed.may_chain(hook.bundle, endpoint.leaf, now):
        return WebhookCall(hook.name, endpoint.address, None, _PERHAPS)
    return WebhookCall(hook.name, endpoint.address, not fault, fault)


def _fault(hook: observed.Hook, leaf: x509.Certificate | None, now: datetime) -> str:
    if leaf and leaf.not_valid_after_utc <= now:
        return "the leaf that is served has expired"
    if leaf and hook.server and not observed.is_for(leaf, hook.server):
        return f"the leaf that is served is not for {hook.server}"
    return "" if observed.trusts(hook.bundle, leaf, now) else _UNTRUSTED


def _late(state: observed.State, now: datetime, policy: steps.RotationPolicy) -> str:
    # Return a fault that an hourly rotation would have prevented; empty if there is none: the leaf is unusable, or less
    # than a quarter of a certificate's life is left, although a rotation renews certificates when a third is left.
    leaf, current = state.serving.leaf, state.authorities.current
    if leaf is None or broken(state, now, policy):
        return broken(state, now, policy)
    for one in (leaf, current):
        end = one.certificate.not_valid_after_utc if one else now
        if one and end - now < (end - observed.issued(one.certificate)) / 4:
            return f"{_short(one.certificate)} has less than a quarter of its life left"
    return ""


def _notes(state: observed.State, policy: steps.RotationPolicy) -> Iterator[str]:
    yield from state.left_alone
    if not any(state.hooks()) and policy.registered:
        yield "No webhook configuration with the label of --selector calls the Service."
    if not state.ready():
        yield "No endpoint is ready."


def _running(refs: parsing.ObjectRefs, job: str) -> Iterator[str]:
    if job:
        describe = f"kubectl -n {refs.namespace} describe job/{job}"
        yield f"Job {job} runs, and takes the next steps. If it still runs after some minutes: {describe}"


def _next_step(decision: steps.Decision) -> str:
    match decision:
        case steps.Done():
            return f"no step is due until {shown_utc(decision.until)}" if decision.until else "no step is due"
        case steps.Wait():
            return decision.reason
        case steps.StepRejected():
            return "no step is possible until a person has solved the problems"
        case _:
            return f"{type(decision).__name__}: {decision.reason}"
