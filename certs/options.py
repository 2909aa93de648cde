"""The options of `vcuda-certs`, the parsers of their values, and the store and policy that the options describe."""

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import click

from certs import cluster, parsing, steps
from vcuda import cli, errors, x509
from vcuda.kube import AuthorizerGrace, Kube, VersionCheck

T = TypeVar("T")
Command = Callable[..., Any]

MIN_LIFE = timedelta(minutes=1)
# The longest duration of an option. Today plus this duration is before the year 10000, which is the limit of Python's
# dates and of certificates.
LONGEST = timedelta(days=36500)

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_LABEL = re.compile(r"\s*([\w./-]+)=([\w.-]+)\s*")
_SPAN = re.compile(r"(\d+)([smhd])")


def parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser for click that calls ``parse``. A ValueError becomes a usage error with the same message."""
    # If a parser raises a ValueError, click itself shows the value that the user wrote, but not the error's message.

    def convert(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return convert


def parse_span(text: str) -> timedelta:
    """Return the duration in a text such as 90d, 12h, 5m or 30s. Raises ValueError if malformed or over LONGEST."""
    span = _span(text)
    if span > LONGEST:
        raise ValueError(f"must be at most {format_span(LONGEST)}; got {text!r}")
    return span


def parse_life(text: str) -> timedelta:
    """Return the validity period in a text such as 90d. Raises ValueError if not from MIN_LIFE to LONGEST."""
    life = _span(text)
    if not MIN_LIFE <= life <= LONGEST:
        raise ValueError(f"must be from 1m to 36500d; got {text!r}")
    return life


def parse_past(text: str) -> datetime:
    """Return the time in an RFC 3339 text. Raises ValueError if the text is wrong or the time is in the future."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"must be a time, for example 2026-01-31T12:00:00Z; got {text!r}") from error
    if moment.tzinfo is None:
        raise ValueError(f"must have a time zone, for example 2026-01-31T12:00:00Z; got {text!r}")
    if moment > datetime.now(UTC):
        raise ValueError(f"must not be in the future, or new certificates would be replaced until then; got {text!r}")
    return moment


def parse_selector(text: str) -> dict[str, str]:
    """Return the labels in a text such as ``KEY=VALUE,KEY2=VALUE2``. Raises ValueError."""
    matches = [_LABEL.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise ValueError(f"must be KEY=VALUE, or several separated by commas; got {text!r}")
    return {match[1]: match[2] for match in matches if match}


def parse_host_port(text: str) -> str:
    """Return ``text`` unchanged if it is HOST:PORT. Raises ValueError if it is not."""
    with contextlib.suppress(errors.BadInput):
        if cli.split_address(text)[0]:
            return text
    raise ValueError(f"must be HOST:PORT, for example 10.0.0.7:8443 or [fd00::7]:8443; got {text!r}")


def format_span(span: timedelta) -> str:
    """Return the duration as text that `parse_span` accepts, for example 90d."""
    seconds = int(span.total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds and seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _span(text: str) -> timedelta:
    match = _SPAN.fullmatch(text)
    if match is None:
        raise ValueError(f"must be a number with a unit s, m, h or d, for example 90d or 30s; got {text!r}")
    try:
        return timedelta(**{_UNITS[match[2]]: int(match[1])})
    except OverflowError:
        return timedelta.max


def value_option(flag: str, metavar: str, parse: Callable[[str], Any], help_text: str, **more: Any) -> Command:
    return cli.option(flag, metavar=metavar, type=parsed(parse), help=help_text, **more)


def span_option(flag: str, default: timedelta, parse: Callable[[str], timedelta], help_text: str) -> Command:
    return value_option(flag, "SPAN", parse, help_text, default=format_span(default))


_SERVICE = (
    cli.kubeconfig_option,
    value_option("--namespace", "NAME", x509.parse_label, "Namespace of these objects.", default="vcuda-quota"),
    value_option("--service", "NAME", x509.parse_label, "The webhook's Service.", default="vcuda-webhook"),
    cli.option("--port-name", default="https", help="Name of the Service's port, if it has several ports."),
    cli.option("--serving-secret", default="vcuda-webhook-tls", help="Secret that the webhook mounts."),
    value_option(
        "--selector",
        "KEY=VALUE",
        parse_selector,
        "Label of the webhook configurations to manage. Other webhook configurations that call the Service are reported"
        " but not changed.",
        default="app.kubernetes.io/part-of=vcuda-quota",
    ),
    value_option(
        "--endpoint",
        "HOST:PORT",
        parse_host_port,
        "Address of the webhook, used instead of the Service's endpoints; repeatable. Webhooks whose url has this"
        " address are managed too.",
        multiple=True,
    ),
)


_ISSUED = (
    cli.option("--ca-secret", default="vcuda-webhook-ca", help="Secret of the CA. Let no other program read it."),
    cli.option(
        "--unregistered",
        is_flag=True,
        help="State that no webhook configuration calls the Service. Other callers get the CA by other means.",
    ),
    value_option("--dns", "NAME", x509.parse_dns_name, "A further name of the webhook; repeatable.", multiple=True),
    value_option("--ip", "ADDRESS", x509.parse_ip, "A further IP address of the webhook; repeatable.", multiple=True),
)


_ROTATION = (
    span_option("--ca-life", x509.AUTHORITY_LIFE, parse_life, "How long a new CA is valid."),
    span_option("--leaf-life", x509.LEAF_LIFE, parse_life, "How long a new leaf is valid."),
    span_option(
        "--overlap",
        steps.OVERLAP,
        parse_span,
        "How long every caBundle must have a new CA before a leaf of that CA is served, so that API servers trust it.",
    ),
    span_option(
        "--retention",
        steps.RETENTION,
        parse_span,
        "How long the old CA stays in the caBundles when every endpoint serves the new leaf.",
    ),
    value_option(
        "--issued-before",
        "TIME",
        parse_past,
        "Replace certificates issued before this time, for example 2026-01-31T12:00:00Z. Use it if a key has leaked.",
    ),
)


_RUN = (
    span_option(
        "--timeout",
        timedelta(minutes=5),
        parse_span,
        "Maximum time of the run. If it ends too early, run the command again: it continues where it stopped.",
    ),
    cli.option("--dry-run", is_flag=True, help="Print the steps of the run, and change nothing."),
)


def all_of(options: Sequence[Command]) -> Command:
    return lambda command: functools.reduce(lambda made, add: add(made), reversed(options), command)


rotation_options = all_of((*_ROTATION, *_RUN))
cluster_options = all_of((*_SERVICE, *_ISSUED))
registration_options = all_of((*_SERVICE, *_RUN))


def connect(kubeconfig: Path | None, *, retried: bool) -> Kube:
    """Return an API client that checks the version of the API server. Raises BadInput for a bad kubeconfig.

    ``retried``: True if the caller retries a request that raises Unavailable.
    """
    check = VersionCheck(lambda message: click.echo(f"Warning: {message}", err=True))
    return Kube.connect(kubeconfig, version_check=check, grace=AuthorizerGrace() if retried else None)


def store_of(where: Mapping[str, Any], *, registers_only: bool = False, retried: bool = False) -> cluster.ClusterStore:
    """Return the store that reads and writes the objects that the options name. ``retried``: see `connect`.

    ``registers_only``: True for `vcuda-certs register`, whose options name no CA Secret.

    Raises click.UsageError if options are wrong, or BadInput if the kubeconfig is wrong.
    """
    if not registers_only and where["ca_secret"] == where["serving_secret"]:
        # The webhook mounts the serving Secret. If this Secret contained the CA too, the webhook could read its key.
        raise click.UsageError(
            "--ca-secret and --serving-secret must be different, because the webhook mounts only --serving-secret."
        )
    endpoints = where["endpoint"]
    secrets = (where.get("ca_secret", ""), where["serving_secret"])
    refs = parsing.ObjectRefs(where["namespace"], where["service"], *secrets, frozenset(endpoints))
    kube = connect(where["kubeconfig"], retried=retried)
    return cluster.ClusterStore(kube, refs, where["selector"], where["port_name"], endpoints, registers_only)


def times_of(where: Mapping[str, Any]) -> dict[str, Any]:
    names = ("ca_life", "leaf_life", "overlap", "retention", "issued_before")
    return {name: where[name] for name in names if name in where}


def registering_policy_of(where: Mapping[str, Any]) -> steps.RotationPolicy:
    return steps.RotationPolicy(x509.Names(), registers_only=True, commands=_commands(where))


def _commands(where: Mapping[str, Any]) -> steps.Commands:
    namespace, service = where["namespace"], where["service"]
    label = " ".join(f"{key}={value}" for key, value in where["selector"].items())
    return steps.Commands(
        restart=f"kubectl -n {namespace} rollout restart deployment/{service}",
        endpoints=f"kubectl -n {namespace} get pods,endpointslices",
        register=f"kubectl label validatingwebhookconfiguration NAME {label}",
    )


def policy_of(where: Mapping[str, Any]) -> steps.RotationPolicy:
    """Return the rotation policy that the options describe. Missing options have default values."""
    namespace, service = where["namespace"], where["service"]
    secrets = f"{where['ca_secret']} {where['serving_secret']}"
    commands = replace(_commands(where), replace=f"kubectl -n {namespace} delete secret {secrets}")
    names = x509.service_names(service, namespace) + x509.Names(where["dns"], where["ip"])
    return steps.RotationPolicy(names, registered=not where["unregistered"], commands=commands, **times_of(where))
