"""The commands ``vcuda-certs client``, for the client certificate by which the webhook recognises API servers."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import yaml

from certs import options, parsing, runs, steps
from certs.cluster import ClientStore
from vcuda import cli, errors, tls, x509

ENVIRONMENT = {"auto_envvar_prefix": "VCUDA_CERTS_CLIENT"}

KUBECONFIG = "kubeconfig"
ADMISSION_CONFIGURATION = "admission.yaml"

_PLUGINS = ("MutatingAdmissionWebhook", "ValidatingAdmissionWebhook")
_API = "apiserver.config.k8s.io/v1"

_WHERE = options.all_of(
    (
        cli.kubeconfig_option,
        options.value_option(
            "--namespace", "NAME", x509.parse_label, "Namespace of the Secrets.", default="vcuda-quota"
        ),
        cli.option("--ca-secret", default="vcuda-client-ca", help="Secret of the CA. Let no other program read it."),
        cli.option("--secret", default="vcuda-client-tls", help="Secret of the client certificate and its key."),
        cli.option(
            "--configmap", default="vcuda-client-ca", help="ConfigMap of the CA certificates. The webhook mounts it."
        ),
        cli.option("--name", default="vcuda-quota-apiserver", help="Common name of the client certificate."),
    )
)


@click.group()
def client() -> None:
    """Manage the client certificate that API servers present to the webhook.

    A webhook that runs with --client-ca answers only clients with such a certificate. API servers find the certificate
    and its key by --admission-control-config-file, and read these files again every 5 minutes.
    """


@client.command(context_settings=ENVIRONMENT)
@_WHERE
@options.rotation_options
@cli.option(
    "--installed",
    is_flag=True,
    help="State that every API server presents the certificate in the Secret, so that the old CA can be removed.",
)
@runs.OUTPUT
def rotate(*, timeout: timedelta, dry_run: bool, output: str, **where: Any) -> None:
    """Create, renew and replace the client certificate and its CA, so that no call is rejected.

    Run this command every hour or every day. It takes only the steps that are due. The certificate is renewed when a
    third of its life is left. Copy the new certificate and its key to every API server before the earlier certificate
    expires. To replace the CA, a run first adds the new CA to the ConfigMap. After --overlap, it writes a certificate
    of the new CA into the Secret. The command cannot see which certificate an API server presents. So the old CA stays
    in the ConfigMap until it expires, or until a run has --installed, and for --retention after that.

    \b
    Examples:
      vcuda-certs client rotate
          the command of the CronJob
      vcuda-certs client rotate --issued-before "$(date -u +%FT%TZ)"
          after the key has leaked: replace it and its CA; then copy the new files to every API server
      vcuda-certs client rotate --installed --retention 6m --timeout 20m
          after that copy: remove the old CA

    Exit status: 0 done, or a later run must continue; 1 a person must solve a problem, the API server did not answer,
    or Kubernetes is too old; 2 bad input.
    """
    runs.execute(lambda: _store(where, retried=not dry_run), _policy(where), timeout, dry_run=dry_run, output=output)


@client.command(context_settings=ENVIRONMENT)
@_WHERE
@runs.OUTPUT
def status(*, output: str, **where: Any) -> None:
    """Show where every certificate is, when it expires, and whether the ConfigMap has the client certificate's CA.

    Exit status: 0 no problem; 1 a person must solve a problem, the API server did not answer, or Kubernetes is too old;
    2 bad input.
    """
    runs.show_report(lambda: _store(where), _policy(where), "vcuda-client-certs", output)


@client.command(context_settings=ENVIRONMENT)
@_WHERE
@cli.option(
    "--dir",
    "directory",
    default="/etc/kubernetes/vcuda",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the files on the API server's machine. kube-apiserver must see them at this path.",
)
@cli.option("--service", default="vcuda-webhook", help="The webhook's Service.")
@cli.option("--server", help="HOST:PORT of a webhook that is registered by URL. Replaces --service.")
@cli.option("--write", is_flag=True, help="Write both files, and the certificate and key in the Secret, to --dir.")
def files(*, directory: Path, service: str, server: str | None, write: bool, **where: Any) -> None:
    """Print an AdmissionConfiguration for kube-apiserver, and the kubeconfig to which it refers.

    Start kube-apiserver with --admission-control-config-file=DIR/admission.yaml. With --write, the command writes all
    files. Run it as root on each machine with an API server, and again after each renewal, for example daily.

    \b
    Examples:
      vcuda-certs client files
          print the entries to add to an existing AdmissionConfiguration
      vcuda-certs client files --kubeconfig /etc/kubernetes/admin.conf --write

    Exit status: 0 done; 1 the API server did not answer, or the Secret has no usable certificate; 2 bad input.
    """
    documents = {
        ADMISSION_CONFIGURATION: admission_configuration(directory),
        KUBECONFIG: kubeconfig(directory, server or f"{service}.{where['namespace']}.svc"),
    }
    if not write:
        click.echo("---\n".join(f"# {directory / name}\n{text}" for name, text in documents.items()), nl=False)
        return
    runs.with_faults(lambda: _write(directory, documents, _store(where)))


def admission_configuration(directory: Path) -> str:
    """Return an AdmissionConfiguration. With it, kube-apiserver calls webhooks by the kubeconfig in ``directory``."""
    configuration = {
        "apiVersion": _API,
        "kind": "WebhookAdmissionConfiguration",
        "kubeConfigFile": str(directory / KUBECONFIG),
    }
    plugins = [{"name": name, "configuration": {**configuration}} for name in _PLUGINS]
    return yaml.safe_dump({"apiVersion": _API, "kind": "AdmissionConfiguration", "plugins": plugins}, sort_keys=False)


def kubeconfig(directory: Path, server: str) -> str:
    """Return a kubeconfig that presents the client certificate in ``directory`` to ``server`` only."""
    pair = {"client-certificate": tls.LEAF_CERTIFICATE, "client-key": tls.LEAF_KEY}
    user = {name: str(directory / file) for name, file in pair.items()}
    document = {"apiVersion": "v1", "kind": "Config", "users": [{"name": server, "user": user}]}
    return yaml.safe_dump(document, sort_keys=False)


def _write(directory: Path, documents: Mapping[str, str], store: ClientStore) -> int:
    leaf = store.pair()
    pair = tls.leaf_files(leaf, "client certificate")
    try:
        tls.write_files(
            directory, [*pair, *(tls.File(name, name, text.encode(), 0o644, None) for name, text in documents.items())]
        )
    except OSError as error:
        raise errors.BadInput(f"cannot write to {directory}: {error.strerror or error}") from error
    click.echo(f"The client certificate is valid until {leaf.expires:%Y-%m-%d %H:%M:%S} UTC")
    return 0


def _store(where: Mapping[str, Any], *, retried: bool = False) -> ClientStore:
    if where["ca_secret"] == where["secret"]:
        raise click.UsageError(
            "--ca-secret and --secret must be different, because the key of the CA must not be copied to the machines "
            "of the API servers."
        )
    refs = parsing.ObjectRefs(where["namespace"], "", where["ca_secret"], where["secret"])
    kube = options.connect(where["kubeconfig"], retried=retried)
    return ClientStore(kube, refs, {}, config_map=where["configmap"])


def _policy(where: Mapping[str, Any]) -> steps.RotationPolicy:
    namespace = where["namespace"]
    commands = replace(
        steps.Commands(),
        dry_run="vcuda-certs client rotate --dry-run",
        allow=f"kubectl -n {namespace} edit role vcuda-client-certs",
    )
    times = options.times_of(where)
    return steps.RotationPolicy(
        x509.Names(), client=where["name"], installed=where.get("installed", False), commands=commands, **times
    )
