"""The command ``vcuda-certs``, which issues and rotates the certificates of the webhook."""

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
    """Issue and rotate the certificates of the vcuda quota webhook.

    The API server calls a webhook only over TLS. It verifies the certificate that the webhook serves by the CA
    certificates in the caBundle of the webhook configuration.
    """


@main.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@cli.option(
    "--dir",
    "directory",
    envvar="VCUDA_CERTS_DIR",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the files. It is created if missing.",
)
@options.value_option("--dns", "NAME", x509.parse_dns_name, "A DNS name of the server; repeatable.", multiple=True)
@options.value_option("--ip", "ADDRESS", x509.parse_ip, "An IP address of the server; repeatable.", multiple=True)
@options.value_option(
    "--service", "NAME", x509.parse_label, "Add NAME, NAME.NS, NAME.NS.svc and NAME.NS.svc.cluster.local for a Service."
)
@options.value_option("--namespace", "NS", x509.parse_label, "The namespace of --service.")
@cli.option(
    "--days",
    type=click.IntRange(1, x509.AUTHORITY_LIFE.days),
    default=x509.LEAF_LIFE.days,
    help=f"Days for which the serving certificate is valid. The CA is valid for {x509.AUTHORITY_LIFE.days} days.",
)
@cli.option("--ca-key", is_flag=True, help="Also write the CA's private key, ca.key. By default it is discarded.")
@cli.option("--force", is_flag=True, help="Replace existing files.")
@runs.OUTPUT
def issue(*, directory: Path, days: int, ca_key: bool, force: bool, output: str, **named: Any) -> None:
    """Make a new CA and a serving certificate, and write them to files.

    Writes ca.crt, tls.crt and tls.key for development, and for `vcuda-webhook serve --cert-dir DIR`. Only the owner can
    read tls.key. A running server loads new files without a restart. Without --dns, --ip and --service the certificate
    is for localhost, 127.0.0.1 and ::1. In environment variables, separate several values by spaces.

    \b
    Examples:
      vcuda-certs issue --dir certs
          for a webhook that runs on this machine
      vcuda-certs issue --dir certs --service vcuda-webhook --namespace vcuda-quota
          for a webhook behind a Service
      vcuda-certs issue --dir certs --dns gpu.example.com --ip 10.0.0.7 --days 30 --force
          replace the files; the new certificate is for these two names and expires after 30 days
      base64 -w0 certs/ca.crt
          print the caBundle for the webhook configuration

    Exit status: 0 the files were written; 2 bad input, or files already exist.
    """
    names = _chosen_names(**named)
    if (present := tls.present_files(directory)) and not force:
        raise click.UsageError(
            f"{directory} already contains {', '.join(present)}. Use --force to replace these files."
        )
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
    if (service is None) != (namespace is None):
        raise click.UsageError("--service and --namespace must be given together.")
    named = x509.service_names(service, namespace) if service and namespace else x509.Names()
    return named + x509.Names(dns, ip) or x509.DEVELOPMENT


def _files_table(directory: Path, names: x509.Names, files: Sequence[tls.File]) -> str:
    rows = [("FILE", "HOLDS", "MODE", "EXPIRES")]
    for file in files:
        end = f"{file.expires:%Y-%m-%d %H:%M UTC}" if file.expires else "-"
        rows.append((str(directory / file.name), file.holds, f"{file.mode:04o}", end))
    return "\n".join([*cli.aligned(rows), "", f"The certificate is valid for {names}"])


def _files_document(directory: Path, names: x509.Names, files: Sequence[tls.File]) -> str:
    # In the JSON output, `expires` is a UTC time in RFC 3339. It is null for a private key, which does not expire.
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

    Run this command every hour or every day. It takes only the steps that are due. The CA and the leaf (the serving
    certificate) are replaced when a third of their life is left. To replace the CA, a run first adds the new CA to
    every caBundle. After --overlap, the run writes a leaf of the new CA into the serving Secret. When every ready
    endpoint has served that leaf for --retention, the run removes the old CA. A run also registers the webhooks that
    the webhook configurations declare in an annotation, after a replica has answered. It repairs deleted or damaged
    Secrets and emptied caBundles. If a run is killed or reaches its --timeout, the next run continues. Two runs at the
    same time do no harm. SPAN is a number with a unit s, m, h or d, for example 90d.

    \b
    Examples:
      vcuda-certs rotate
          the command of the CronJob
      vcuda-certs rotate --dry-run
          print all steps until no step is due, and change nothing
      vcuda-certs rotate --issued-before "$(date -u +%FT%TZ)" --overlap 1m --retention 5m --timeout 20m
          replace the CA and the leaf now, in one run

    Exit status: 0 done, or a later run must continue; 1 a person must solve a problem, the API server did not answer,
    or Kubernetes is too old; 2 bad input.
    """
    store = functools.partial(options.store_of, where, retried=not dry_run)
    runs.execute(store, options.policy_of(where), timeout, dry_run=dry_run, output=output)


@main.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@options.registration_options
@runs.OUTPUT
def register(*, timeout: timedelta, dry_run: bool, output: str, **where: Any) -> None:
    """Register the webhooks after a replica has answered, if another tool issues the certificates.

    The manifests contain webhook configurations without webhooks, each with an annotation that declares its webhooks.
    So an image that never starts blocks no pod. When a replica serves a certificate of the CA in the serving Secret,
    this command registers the declared webhooks with that CA as their caBundle. It also repairs registered webhooks
    that differ from the declared webhooks. If vcuda-certs issues the certificates, `rotate` does all this. SPAN is a
    number with a unit s, m, h or d, for example 25m.

    \b
    Examples:
      vcuda-certs register
          the command of the CronJob in an installation with cert-manager
      vcuda-certs register --dry-run

    Exit status: 0 done, or a later run must continue; 1 a person must solve a problem, the API server did not answer,
    or Kubernetes is too old; 2 bad input.
    """
    store = functools.partial(options.store_of, where, registers_only=True, retried=not dry_run)
    runs.execute(store, options.registering_policy_of(where), timeout, dry_run=dry_run, output=output)


@main.command(context_settings={"auto_envvar_prefix": "VCUDA_CERTS"})
@options.cluster_options
@runs.OUTPUT
def status(*, output: str, **where: Any) -> None:
    """Show where every certificate is, when it expires, and whether the API servers trust the served certificates.

    Webhook configurations and policies that the API server lacks are problems too.

    \b
    Examples:
      vcuda-certs status
      vcuda-certs status -o json | jq '.certificates[] | select(.daysLeft < 30)'

    Exit status: 0 no problem; 1 a person must solve a problem, the API server did not answer, or Kubernetes is too old;
    2 bad input.
    """
    store, policy = functools.partial(options.store_of, where), options.policy_of(where)
    runs.show_report(store, policy, "vcuda-certs", output, registered=policy.registered)


main.add_command(client.client)
