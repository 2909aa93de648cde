"""The demo: starts a webhook on this machine, sends example pods to the webhook, and prints a table of the decisions.

The command is ``python -m examples.demo``. Unlike `vcuda-webhook check`, the demo starts a webhook server and acts as
the API server. It sends each pod in AdmissionReviews over TLS, first to /mutate, and then to /validate with the patch.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import os
import ssl
import subprocess
import sysconfig
import textwrap
import threading
import urllib.parse
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from vcuda.admission_review import API_VERSION, KIND, AdmissionRequest, AdmissionResponse
from vcuda.cli import aligned
from vcuda.errors import BadInput
from vcuda.k8s_types import Pod
from vcuda.placement.patches import PinSettings
from vcuda.quota.model import Mode, NamespaceQuota
from vcuda.requests.pod_request import requests_gpus
from webhook.check.check import Row, decide_workloads, read_workloads, with_templates
from webhook.check.files import read_cluster
from webhook.review.context import PolicySnapshot

EXAMPLES = Path(__file__).parents[1] / "manifests" / "examples"
WRAPPER = textwrap.TextWrapper(120, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)
TIMEOUT_SECONDS = 30

Json = dict[str, Any]
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


class Misbehaved(click.ClickException):
    """Raised if the webhook server does not start, answer or stop correctly. The demo ends with exit status 1."""


@click.command()
@click.option("--quota", type=_file, default=EXAMPLES / "gpuquota.yaml", help="Quota document, or its ConfigMap.")
@click.option("--nodes", type=_file, default=EXAMPLES / "demo" / "nodes.yaml", help="Nodes and devices of the cluster.")
@click.option(
    "--pods", type=_file, default=EXAMPLES / "demo" / "pods.yaml", help="Pods and claims to create, in this order."
)
def main(quota: Path, nodes: Path, pods: Path) -> None:
    """Start the webhook without a cluster, create the example pods and claims, and print the outcome of each.

    \b
    Examples:
      python -m examples.demo
      python -m examples.demo --quota gpuquota.yaml --pods deployment.yaml

    Exit status: 0 success, 1 the server failed, 2 bad input.
    """
    try:
        workloads = read_workloads([pods], "default")
        cluster = with_templates(read_cluster(quota, nodes, PinSettings()), workloads)
    except BadInput as error:
        raise click.UsageError(str(error)) from error
    click.echo(f"Starting vcuda-webhook serve --standalone --quota {_short(quota)} --nodes {_short(nodes)}")
    with serving(quota, nodes) as connection:
        click.echo(f"It serves https://{connection.host}:{connection.port}, with a certificate issued for this run.\n")
        for namespace, entry in cluster.policy.quota.namespaces.items():
            click.echo(f"{namespace} may use {_allowance(entry)}")
        for team, entry in cluster.policy.quota.teams.items():
            members = ", ".join(cluster.policy.quota.members.items[team])
            click.echo(f"the namespaces of team {team} ({members}) together may use {_allowance(entry)}")
        click.echo(
            f"\nCreating the objects of {_short(pods)}. Like the API server, the demo calls /mutate, then /validate.\n"
        )

        async def ask(path: str, request: AdmissionRequest) -> AdmissionResponse:
            return _ask(connection, path, request, cluster.policy)

        rows = asyncio.run(decide_workloads(workloads, ask, cluster))
    click.echo("\n".join(_table(rows)))
    tally = Counter(row.decision for row in rows for _ in range(row.count))
    decided = ", ".join(f"{count} {decision}" for decision, count in tally.items())
    click.echo(f"\n{tally.total()} pods and claims: {decided}. The webhook has stopped.")


@contextmanager
def serving(quota: Path, nodes: Path) -> Iterator[http.client.HTTPSConnection]:
    """Run the webhook server on a free port of 127.0.0.1 during the ``with`` statement, and yield a connection.

    Raises Misbehaved if the server does not start, or ends with another exit status than 0.
    """
    program = Path(sysconfig.get_path("scripts"), "vcuda-webhook")
    files = ["--quota", str(quota), "--nodes", str(nodes)]
    command = [str(program), "serve", "--standalone", *files, "--bind", "127.0.0.1:0", "--drain-seconds", "0"]
    # The variables VCUDA_… are removed from the environment, because the server would read them as values of flags.
    env = {name: value for name, value in os.environ.items() if not name.startswith("VCUDA_")}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:  # noqa: S603  # our own program
        try:
            with closing(_connect(process.stdout)) as connection:
                yield connection
        finally:
            process.terminate()
            try:
                process.wait(TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
    if process.returncode:
        raise Misbehaved(f"the webhook server ended with exit status {process.returncode}")


def _connect(log: IO[bytes] | None) -> http.client.HTTPSConnection:
    """Connect to the server. Its address and the file of its CA are read from its log."""
    told: dict[str, str] = {}
    for line in log or ():
        told |= {key: str(value) for key, value in msgspec.json.decode(line, type=Json).items()}
        if "url" in told:
            # A thread reads the rest of the server's log and drops it, because a full pipe would block the server.
            threading.Thread(target=deque, args=(log, 0), daemon=True).start()
            trust = ssl.create_default_context(cafile=told["ca"])
            host = urllib.parse.urlsplit(told["url"]).netloc
            return http.client.HTTPSConnection(host, context=trust, timeout=TIMEOUT_SECONDS)
    raise Misbehaved("the webhook server ended before it served requests. Its output is above this message")


def _ask(
    connection: http.client.HTTPSConnection, path: str, request: AdmissionRequest, policy: PolicySnapshot
) -> AdmissionResponse:
    """Send the request in an AdmissionReview to the webhook, and return the webhook's answer."""
    body = msgspec.json.encode({"apiVersion": API_VERSION, "kind": KIND, "request": request})
    try:
        connection.request("POST", f"{path}?timeout=10s", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        answer = msgspec.json.decode(reply.read(), type=Json)
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise Misbehaved(f"the webhook server did not answer a request for {path}: {error}") from error
    if reply.status != HTTPStatus.OK or answer["response"]["uid"] != request.uid:
        raise Misbehaved(f"the webhook server answered a request for {path} with HTTP {reply.status}: {answer}")
    response: Json = answer["response"]
    told = response.get("auditAnnotations", {})
    # The outcome of a request is only in the webhook's logs and metrics, and not in the answer. If the webhook did not
    # change the object, the demo derives the outcome from the object.
    touched = told or response.get("patch") or not response["allowed"]
    return AdmissionResponse(
        outcome="" if touched else _untouched(request, policy),
        allowed=response["allowed"],
        message=response.get("status", {}).get("message", ""),
        patch=msgspec.json.decode(base64.b64decode(response.get("patch", "")) or b"[]"),
        warnings=response.get("warnings", ()),
        reason=told.get("reason", ""),
        model=told.get("model", ""),
    )


def _untouched(request: AdmissionRequest, policy: PolicySnapshot) -> str:
    """Return the outcome for an object that the webhook admits unchanged, such as "ignored" if it requests no GPU."""
    if request.kind.kind == "Pod":
        pod = msgspec.json.decode(request.object, type=Pod)
        if not (requests_gpus(pod, policy.resources) or pod.spec.resource_claims):
            return "ignored"
    return "" if policy.quota.for_namespace(request.namespace) else "unlimited"


def _table(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the table. The reason of each decision follows after its line."""
    names = [f"{row.namespace}/{row.object.partition('/')[2]}" for row in rows]
    cells = [(name, row.charge_text, row.decision, row.model) for name, row in zip(names, rows, strict=True)]
    heading, *lines = aligned([("NAME", "ASKS FOR", "DECISION", "MODEL"), *cells])
    yield heading
    for line, row in zip(lines, rows, strict=True):
        yield line
        yield from WRAPPER.wrap(row.reason)


def _allowance(entry: NamespaceQuota) -> str:
    """Return the quota of a namespace in words, for example ``2 cards of M40, in pool public``."""
    limits = [f"{limit} of {model}" for model, limit in entry.limits.items()]
    pools = f", in pool {' or '.join(entry.pools)}" if entry.pools else ""
    mode = "" if entry.mode is Mode.ENFORCE else f" (mode {entry.mode})"
    return f"{', '.join(limits) or 'no GPU'}{pools}{mode}"


def _short(path: Path) -> str:
    """Return the path of a file, relative to the current directory if the file is in this directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    main()
