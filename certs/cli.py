"""The command ``vcuda-certs``."""

import functools
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from certs import client, options, runs
from vcuda import cli, tls, x509


@click.group(context_settings=cli.HELP)
@click.version_option(package_name="vcuda-quota", message="%(prog)s %(version)s")
def main() -> None:
    """Certificates of the vcuda quota webhook.

    The API server calls a webhook over TLS only, and trusts it by the caBundle in the webhook's configuration.
    """


@main.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@cli.option(
    "--dir",
    "directory",
    envvar="VCUDA_CERTS_DIR",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the files; created if missing.",
)
@options.value_option("--dns", "NAME", x509.parse_dns_name, "A DNS name; repeatable.", multiple=True)
@options.value_option("--ip", "ADDRESS", x509.parse_address, "An IP address; repeatable.", multiple=True)
@options.value_option(
    "--service", "NAME", x509.parse_label, "A Service: adds NAME, NAME.NS, NAME.NS.svc and NAME.NS.svc.cluster.local."
)
@options.value_option("--namespace", "NS", x509.parse_label, "The namespace of --service.")
@cli.option(
    "--days",
    type=click.IntRange(1, x509.AUTHORITY_LIFE.days),
    default=x509.LEAF_LIFE.days,
    help=f"Life of the serving certificate; its CA lives {x509.AUTHORITY_LIFE.days} days.",
)
@cli.option("--ca-key", is_flag=True, help="Write ca.key too; without it the key of the CA is thrown away.")
@cli.option("--force", is_flag=True, help="Replace the files that are there.")
@runs.OUTPUT
def issue(*, directory: Path, days: int, ca_key: bool, force: bool, output: str, **named: Any) -> None:
    """Make a new CA and a serving certificate, and write them to files.

    For development, and for `vcuda-webhook serve --cert-dir DIR`. Writes ca.crt, tls.crt and tls.key (readable by
    its owner alone). A server that is running picks new files up by itself. Without --dns, --ip and --service the
    certificate is for localhost, 127.0.0.1 and ::1. In environment variables, separate several values by spaces.

    \b
    Examples:
      vcuda-certs issue --dir certs
          to run the webhook on this machine
      vcuda-certs issue --dir certs --service vcuda-webhook --namespace vcuda-quota
          to run it behind a Service
      vcuda-certs issue --dir certs --dns gpu.example.com --ip 10.0.0.7 --days 30 --force
          to replace them with shorter-lived ones for these names
      base64 -w0 certs/ca.crt
          the caBundle for the webhook's configuration

    Exit status: 0 written, 2 bad input or files in the way.
    """
    names = _chosen_names(**named)
    if (present := tls.present_files(directory)) and not force:
        raise click.UsageError(f"{directory} already holds {', '.join(present)}: --force replaces them.")
    now = datetime.now(UTC)
    authority = x509.make_authority(now)
    leaf = x509.make_leaf(authority, names, now, timedelta(days=days))
    files = tls.serving_files(authority, leaf) + (tls.signing_files(authority) if ca_key else ())
    try:
        tls.write_files(directory, files)
    except OSError as error:
        raise click.UsageError(f"cannot write to {directory}: {error.strerror or error}.") from error
    render = {"table": _files_table, "json": _files_document}[output]
    click.echo(render(directory, names, files))


def _chosen_names(
    dns: tuple[str, ...], ip: tuple[x509.Address, ...], service: str | None, namespace: str | None
) -> x509.Names:
    """Return the names from the options, the Service's names first. Without any, return the development names."""
    if (service is None) != (namespace is None):
        raise click.UsageError("--service and --namespace are given together or not at all.")
    named = x509.service_names(service, namespace) if service and namespace else x509.Names()
    return named + x509.Names(dns, ip) or x509.DEVELOPMENT


def _files_table(directory: Path, names: x509.Names, files: Sequence[tls.File]) -> str:
    rows = [("FILE", "HOLDS", "MODE", "EXPIRES")]
    for file in files:
        end = f"{file.expires:%Y-%m-%d %H:%M UTC}" if file.expires else "-"
        rows.append((str(directory / file.name), file.holds, f"{file.mode:04o}", end))
    return "\n".join([*cli.aligned(rows), "", f"Valid for {names}"])


def _files_document(directory: Path, names: x509.Names, files: Sequence[tls.File]) -> str:
    # The file list as JSON. The expiry time is RFC 3339 in UTC for a certificate, and null for a key.
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


@main.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@options.cluster_options
@options.rotation_options
@runs.OUTPUT
def rotate(*, timeout: timedelta, dry_run: bool, output: str, **where: Any) -> None:
    """Create, renew and replace the webhook's certificates, so that no call fails.

    Run it every hour or every day: it does only what is due. A certificate is replaced when a third of its life is
    left. A new CA is first added to every caBundle. After --overlap a leaf of the new CA is written into the serving
    Secret. When every ready endpoint shows that leaf, and --retention is over, the old CA is removed. The same CA
    renews a single leaf. The webhooks that the configurations declare are registered after a replica has answered. The
    next run continues after a run that was killed or reached its --timeout, and two runs at
    the same time do no harm. A run also repairs a deleted or damaged Secret and an emptied caBundle. SPAN is a number
    and one of s, m, h and d, such as 90d.

    \b
    Examples:
      vcuda-certs rotate
          what the CronJob runs
      vcuda-certs rotate --dry-run
          what it would do, to the end
      vcuda-certs rotate --issued-before "$(date -u +%FT%TZ)" --overlap 1m --retention 5m --timeout 20m
          replace the CA and the leaf now, in one run

    Exit status: 0 done, or a later run has to go on; 1 a person is needed, the API server did not answer, or
    Kubernetes is too old; 2 bad input.
    """
    store = functools.partial(options.store_of, where, retried=not dry_run)
    runs.rotate(store, options.policy_of(where), timeout, dry_run=dry_run, output=output)


@main.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@options.registration_options
@runs.OUTPUT
def register(*, timeout: timedelta, dry_run: bool, output: str, **where: Any) -> None:
    """Register the webhooks after a replica has answered, where another tool issues the certificates.

    The manifests apply webhook configurations that have no webhooks, only an annotation that declares them. So an
    image that never starts blocks no pod. When a replica serves a certificate of the CA in the serving Secret, this
    command registers the declared webhooks with that CA as their caBundle. It also repairs webhooks that differ from
    the declared ones. `rotate` does the same where vcuda-certs issues the certificates. SPAN is a number and one of s,
    m, h and d, such as 25m.

    \b
    Examples:
      vcuda-certs register
          what the CronJob runs beside cert-manager
      vcuda-certs register --dry-run

    Exit status: 0 done, or a later run has to go on; 1 a person is needed, the API server did not answer, or
    Kubernetes is too old; 2 bad input.
    """
    store = functools.partial(options.registering_store_of, where, retried=not dry_run)
    runs.rotate(store, options.registering_policy_of(where), timeout, dry_run=dry_run, output=output)


@main.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@options.cluster_options
@runs.OUTPUT
def status(*, output: str, **where: Any) -> None:
    """Show every certificate, where it is, when it expires, and whether the webhooks trust what is served.

    \b
    Examples:
      vcuda-certs status
      vcuda-certs status -o json | jq '.certificates[] | select(.daysLeft < 30)'

    Exit status: 0 all is well; 1 something needs a person, the API server did not answer, or Kubernetes is too old;
    2 bad input.
    """
    runs.show(functools.partial(options.store_of, where), options.policy_of(where), "vcuda-certs", output)


main.add_command(client.client)
