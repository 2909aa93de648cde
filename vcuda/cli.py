"""The common parts of all commands: shared flags, types of flags that click lacks, and the parsing of addresses."""

import contextlib
import functools
import ipaddress
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from vcuda.errors import BadInput
from vcuda.quota.well_known import (
    LEDGER_NAMESPACE,
    MAX_TERMINATING_SECONDS,
    MODEL_LABEL,
    NODE_NAMESPACE,
    POOL_LABEL,
    STORABLE_SECONDS,
)

FAILED = 1
"""The exit status of a program that could not do its work."""

BAD_INPUT = 2
"""The exit status of a program whose input is wrong. click uses the same status for an invalid flag."""

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""The context settings of click for every program."""

option = functools.partial(click.option, show_envvar=True, show_default=True)
"""``click.option``, except that --help also shows the environment variable and the default of the flag."""


def escaped(text: str) -> str:
    """Return a text with its unprintable characters escaped, for example control codes of a terminal."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def whole_units(span: timedelta) -> str:
    """Return a span of time in whole days, or if it is shorter, in whole hours or minutes. ``span``: at least 0."""
    for unit in ("day", "hour", "minute"):
        if count := span // timedelta(**{f"{unit}s": 1}):
            return f"{count} {unit}{'s' * (count > 1)}"
    return "less than a minute"


def fail(message: str, status: int = BAD_INPUT) -> NoReturn:
    click.echo("Error: " + "\n".join(map(escaped, message.split("\n"))), err=True)
    raise SystemExit(status)


def address_option(
    flag: str, *, parse: Callable[[str], tuple[str, int]] | None = None, **attributes: Any
) -> Callable[[Any], Any]:
    """Return a click option with the value (host, port) or None. ``parse`` must raise BadInput for a wrong address."""

    def convert(_context: click.Context, _parameter: click.Parameter, text: str | None) -> tuple[str, int] | None:
        if text is None:
            return None
        try:
            return (parse or split_address)(text)
        except BadInput as error:
            raise click.BadParameter(str(error), param_hint=flag) from error

    return option(flag, **{"metavar": "HOST:PORT", "callback": convert, **attributes})


def _namespace_and_name(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, str]:
    namespace, slash, name = text.partition("/")
    if not (namespace and slash and name):
        raise click.BadParameter(f"{text!r} is not NAMESPACE/NAME.", param_hint="--quota-configmap")
    return namespace, name


# Each option is a separate decorator, because --help lists the flags of a command in the order of its decorators.
kubeconfig_option = option(
    "--kubeconfig",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Kubeconfig. The default is the pod's service account, or outside a pod KUBECONFIG or ~/.kube/config.",
)
quota_configmap_option = option(
    "--quota-configmap",
    default="kube-system/gpuquota",
    metavar="NS/NAME",
    callback=_namespace_and_name,
    help="ConfigMap with the quota.",
)
quota_key_option = option("--quota-key", default="gpu_quota", help="Key of the quota in this ConfigMap.")
ledger_namespace_option = option(
    "--ledger-namespace", default=LEDGER_NAMESPACE, help="Namespace of the ledgers. It must contain nothing else."
)
node_namespace_option = option(
    "--node-namespace",
    default=NODE_NAMESPACE,
    help='Namespace of the node agents. The quota entry "*" does not limit pods there.',
)
model_label_option = option("--model-label", default=MODEL_LABEL, help="Node label with the GPU model of a node.")
pool_label_option = option("--pool-label", default=POOL_LABEL, help="Node label with the pool of a node.")
storable_option = option(
    "--storable-seconds",
    default=STORABLE_SECONDS,
    type=click.IntRange(1, 3600),
    help="Seconds after which an admitted pod can no longer be stored. Must exceed the API server's --request-timeout.",
)
max_terminating_option = option(
    "--max-terminating-seconds",
    default=MAX_TERMINATING_SECONDS,
    type=click.IntRange(0, 86400),
    help="Most seconds for which a deleted pod stays charged if it was running. Pods with a longer grace period are "
    "rejected. The webhook and the controller must have the same value.",
)
log_level_option = option("--log-level", default="info", type=click.Choice(["debug", "info", "warning", "error"]))
status_address_option = address_option(
    "--status-address", default="0.0.0.0:8080", help="Address of /healthz, /readyz and /metrics."
)


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The values of the options that the webhook and the controller share, which docs/reference.md explains."""

    kubeconfig: Path | None
    quota_configmap: tuple[str, str]
    quota_key: str
    system_namespace: str
    ledger_namespace: str
    node_namespace: str
    model_label: str
    pool_label: str
    storable_seconds: int
    max_terminating_seconds: int
    log_level: str


class FiniteRange(click.FloatRange):
    """A type of flag for finite numbers within bounds. click's own type also accepts nan, whatever the bounds are."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def aligned(cells: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


_LAST_PORT = 65535


def split_address(text: str) -> tuple[str, int]:
    """Return the host and the port in HOST:PORT. An IPv6 host may be in brackets. Raises BadInput for other texts."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    good = (":" in host or not bracketed) and _can_be_host(host)
    if not (colon and good and port.isascii() and port.isdigit() and int(port) <= _LAST_PORT):
        raise BadInput(f"must be HOST:PORT, for example 127.0.0.1:8080 or [fd00::7]:8080; got {text!r}.")
    return host, int(port)


def format_address(address: tuple[str, int]) -> str:
    """Return an address as HOST:PORT. An IPv6 host is in brackets."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_ip_address(text: str) -> tuple[str, int]:
    """Return the host and the port in IP:PORT. Raises BadInput for other texts, and for an address with a zone."""
    with contextlib.suppress(BadInput, ValueError):
        host, port = split_address(text)
        address = ipaddress.ip_address(host)
        if "%" not in host:
            return str(address), port
    raise BadInput(f"must be IP:PORT, for example 10.0.0.7:8080; got {text!r}.")


@contextlib.contextmanager
def listening_for(flag: str, address: tuple[str, int]) -> Iterator[None]:
    """Return a context manager for the start of a server on ``address``. An OSError becomes an error of ``flag``."""
    try:
        yield
    except OSError as error:
        raise click.BadParameter(f"{format_address(address)}: {error.strerror or error}.", param_hint=flag) from error


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _can_be_host(host: str) -> bool:
    """Return whether ``host`` may be an IP address or a name. An empty host stands for all addresses."""
    with contextlib.suppress(ValueError):  # UnicodeError, the error of ``encode``, is a ValueError
        if ":" in host:
            ipaddress.IPv6Address(host)
        else:
            host.encode("idna")
        return True
    return False
