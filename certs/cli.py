"""The command ``vcuda-certs``."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click

from certs.commands import rotate, status
from certs.files import File, present_files, serving_files, signing_files, write_files
from certs.options import parsed
from certs.report import columns
from certs.x509 import (
    AUTHORITY_LIFE,
    DEVELOPMENT,
    LEAF_LIFE,
    Address,
    Names,
    make_authority,
    make_leaf,
    parse_address,
    parse_dns_name,
    parse_label,
    service_names,
)

_option = functools.partial(click.option, show_envvar=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="vcuda-quota", message="%(prog)s %(version)s")
def main() -> None:
    """Certificates of the vcuda quota webhook.

    The API server calls a webhook over TLS only, and trusts it by the caBundle in the webhook's configuration.
    """


@main.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@_option(
    "--dir",
    "directory",
    envvar="VCUDA_CERTS_DIR",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to write; made if missing.",
)
@_option("--dns", multiple=True, metavar="NAME", type=parsed(parse_dns_name), help="A DNS name; repeatable.")
@_option("--ip", multiple=True, metavar="ADDRESS", type=parsed(parse_address), help="An IP address; repeatable.")
@_option(
    "--service",
    metavar="NAME",
    type=parsed(parse_label),
    help="A Service: adds NAME, NAME.NS, NAME.NS.svc and NAME.NS.svc.cluster.local.",
)
@_option("--namespace", metavar="NS", type=parsed(parse_label), help="The namespace of --service.")
@_option(
    "--days",
    type=click.IntRange(1, AUTHORITY_LIFE.days),
    default=LEAF_LIFE.days,
    show_default=True,
    help=f"Life of the serving certificate; its CA lives {AUTHORITY_LIFE.days} days.",
)
@_option("--ca-key", is_flag=True, help="Write ca.key too; without it the key of the CA is thrown away.")
@_option("--force", is_flag=True, help="Replace the files that are there.")
@_option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def issue(
    *,
    directory: Path,
    dns: tuple[str, ...],
    ip: tuple[Address, ...],
    service: str | None,
    namespace: str | None,
    days: int,
    ca_key: bool,
    force: bool,
    output: str,
) -> None:
    """Make a new CA and a serving certificate, and write them to files.

    For development, and for `vcuda-webhook serve --cert-dir DIR`. Writes ca.crt, tls.crt and tls.key (readable by
    its owner alone). A server that is running picks new files up by itself. Without --dns, --ip and --service the
    certificate is for localhost, 127.0.0.1 and ::1. In environment variables, separate several values by spaces.

    \b
    Examples:
      vcuda-certs issue --dir certs
          to run the webhook on this machine
      vcuda-certs issue --dir certs --service vcuda-webhook --namespace vcuda-system
          to run it behind a Service
      vcuda-certs issue --dir certs --dns gpu.example.com --ip 10.0.0.7 --days 30 --force
          to replace them with shorter-lived ones for these names
      base64 -w0 certs/ca.crt
          the caBundle for the webhook's configuration

    Exit status: 0 written, 2 bad input or files in the way.
    """
    names = _chosen_names(dns, ip, service, namespace)
    if (present := present_files(directory)) and not force:
        raise click.UsageError(f"{directory} already holds {', '.join(present)}: --force replaces them.")
    now = datetime.now(UTC)
    authority = make_authority(now)
    leaf = make_leaf(authority, names, now, timedelta(days=days))
    files = serving_files(authority, leaf) + (signing_files(authority) if ca_key else ())
    try:
        write_files(directory, files)
    except OSError as error:
        raise click.UsageError(f"cannot write to {directory}: {error.strerror or error}.") from error
    render = {"table": _table, "json": _document}[output]
    click.echo(render(directory, names, files))


def _chosen_names(
    dns: tuple[str, ...], addresses: tuple[Address, ...], service: str | None, namespace: str | None
) -> Names:
    """Every name asked for, the Service's first; those for development when none is."""
    if (service is None) != (namespace is None):
        raise click.UsageError("--service and --namespace are given together or not at all.")
    named = service_names(service, namespace) if service and namespace else Names()
    return named + Names(dns, addresses) or DEVELOPMENT


def _table(directory: Path, names: Names, files: Sequence[File]) -> str:
    """One row a file; then the names the certificate is for."""
    rows = [("FILE", "HOLDS", "MODE", "EXPIRES")]
    rows += [(str(directory / file.name), file.holds, f"{file.mode:04o}", _day(file)) for file in files]
    return "\n".join([columns(rows), "", f"Valid for {names}"])


def _day(file: File) -> str:
    return "-" if file.expires is None else f"{file.expires:%Y-%m-%d %H:%M UTC}"


def _document(directory: Path, names: Names, files: Sequence[File]) -> str:
    """The same as JSON; times as RFC 3339 in UTC, null for a key."""
    document = {
        "directory": str(directory),
        "dns": names.dns,
        "ip": [str(address) for address in names.addresses],
        "files": [
            {
                "path": str(directory / file.name),
                "holds": file.holds,
                "mode": f"{file.mode:04o}",
                "expires": file.expires and f"{file.expires:%Y-%m-%dT%H:%M:%SZ}",
            }
            for file in files
        ],
    }
    return json.dumps(document, indent=2)


main.add_command(rotate)
main.add_command(status)
