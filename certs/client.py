"""The commands ``vcuda-certs client``: the client certificate by which the webhook recognises API servers."""

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
            "--namespace", "NAME", x509.parse_label, "Namespace of all of these.", default="vcuda-quota"
        ),
        cli.option("--ca-secret", default="vcuda-client-ca", help="Secret of the CA, which nothing else may read."),
        cli.option("--secret", default="vcuda-client-tls", help="Secret of the pair that API servers present."),
        cli.option(
            "--configmap",
            default="vcuda-client-ca",
            help="ConfigMap of the CA's certificate, for the webhook to mount.",
        ),
        cli.option("--name", default="vcuda-quota-apiserver", help="Common name of the client certificate."),
    )
)


@click.group()
def client() -> None:
    """The client certificate that API servers present to the webhook.

    With --client-ca the webhook answers no other client. API servers read the pair from files that
    --admission-control-config-file names, and read these files again every 5 minutes.
    """


@client.command(context_settings=ENVIRONMENT)
@_WHERE
@options.rotation_options
@cli.option(
    "--installed",
    is_flag=True,
    help="Every API server presents the pair that is in the Secret: no earlier one has to be trusted any more.",
)
@runs.OUTPUT
def rotate(*, timeout: timedelta, dry_run: bool, output: str, **where: Any) -> None:
    """Make, renew and replace the client pair and its CA, so that not one call is refused.

    Run it every hour or every day: it does only what is due. The pair is renewed when a third of its life is left:
    copy it to every API server before its end. A new CA is first added to the ConfigMap. After --overlap a pair of the
    new CA is written into the Secret. The command cannot see the pair that an API server presents. So the old CA stays
    in the ConfigMap until none of its pairs can be valid, or until --installed, and then for --retention.

    \b
    Examples:
      vcuda-certs client rotate
          what the CronJob runs
      vcuda-certs client rotate --issued-before "$(date -u +%FT%TZ)"
          the key has leaked: replace it and its CA; copy the new pair to every API server, then
      vcuda-certs client rotate --installed --retention 6m --timeout 20m
          trust the old CA no longer

    Exit status: 0 done, or a later run has to go on; 1 a person is needed, the API server did not answer, or
    Kubernetes is too old; 2 bad input.
    """
    runs.rotate(lambda: _store(where, retried=not dry_run), _policy(where), timeout, dry_run=dry_run, output=output)


@client.command(context_settings=ENVIRONMENT)
@_WHERE
@runs.OUTPUT
def status(*, output: str, **where: Any) -> None:
    """Show every certificate, where it is, when it expires, and whether the ConfigMap trusts the pair.

    Exit status: 0 all is well; 1 something needs a person, the API server did not answer, or Kubernetes is too old;
    2 bad input.
    """
    runs.show(lambda: _store(where), _policy(where), "vcuda-client-certs", output)


@client.command(context_settings=ENVIRONMENT)
@_WHERE
@cli.option(
    "--dir",
    "directory",
    default="/etc/kubernetes/vcuda",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory on the API server's machine, as the API server sees it.",
)
@cli.option("--service", default="vcuda-webhook", help="The webhook's Service.")
@cli.option("--server", help="HOST:PORT of a webhook that is registered by its URL, in place of --service.")
@cli.option("--write", is_flag=True, help="Write both, and the pair in the Secret, to --dir in one step.")
def files(*, directory: Path, service: str, server: str | None, write: bool, **where: Any) -> None:
    """Print what kube-apiserver needs: an AdmissionConfiguration, and the kubeconfig that it names.

    Start kube-apiserver with --admission-control-config-file=DIR/admission.yaml. With --write all files are written,
    as root on each machine with an API server, and again for each new pair: daily, say.

    \b
    Examples:
      vcuda-certs client files
          what to add to an AdmissionConfiguration that there is
      vcuda-certs client files --kubeconfig /etc/kubernetes/admin.conf --write

    Exit status: 0 done; 1 the API server did not answer, or has no good pair; 2 bad input.
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
    """Return an AdmissionConfiguration that gives the webhook plugins the kubeconfig in ``directory``."""
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
    click.echo(f"The pair is valid until {leaf.expires:%Y-%m-%d %H:%M:%S} UTC")
    return 0


def _store(where: Mapping[str, Any], *, retried: bool = False) -> ClientStore:
    if where["ca_secret"] == where["secret"]:
        raise click.UsageError(
            "--ca-secret and --secret are two: the pair is copied to machines, and the CA's key to none."
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
