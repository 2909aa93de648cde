"""The demo: a webhook of its own on this machine, example pods sent through it, and a table of what became of them.

Run as ``python -m examples.demo``. It stands in for the API server and does what that does: AdmissionReviews over TLS,
/mutate first, then /validate with the patched pod and its uid.
"""

from __future__ import annotations

import base64
import http.client
import os
import ssl
import subprocess
import sysconfig
import textwrap
import threading
import urllib.parse
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

import click
import jsonpatch
import msgspec

from vcuda.cli import aligned
from vcuda.errors import BadInput
from vcuda.k8s_types import API_VERSION, KIND, Pod
from vcuda.quota.model import Mode, NamespaceQuota, cards
from vcuda.requests.pod_request import asks_for_vcuda, read_request
from vcuda.workloads import Manifest, Workload
from webhook.check import patch_story
from webhook.manifests import read_quota, read_workloads

EXAMPLES = Path(__file__).parents[1] / "manifests" / "examples"
WRAPPER = textwrap.TextWrapper(120, initial_indent="    ", subsequent_indent="      ", break_on_hyphens=False)
PATIENCE = 30
"""Seconds for an answer, and for the server to end."""

Json = dict[str, Any]
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


class Misbehaved(click.ClickException):
    """The server did not start, answer or stop as it must; the demo ends with status 1."""


class Fate(msgspec.Struct, frozen=True):
    """What became of one pod; ``stories`` are sentences about it."""

    pod: str
    charge: str
    decision: str
    model: str
    stories: Sequence[str]


@click.command()
@click.option("--quota", type=_file, default=EXAMPLES / "gpuquota.yaml", help="Quota document, or its ConfigMap.")
@click.option("--nodes", type=_file, default=EXAMPLES / "demo" / "nodes.yaml", help="Nodes of the cluster to play.")
@click.option("--pods", type=_file, default=EXAMPLES / "demo" / "pods.yaml", help="Pods to create, in this order.")
def main(quota: Path, nodes: Path, pods: Path) -> None:
    """Start the webhook without a cluster, create the example pods, and tell what became of each.

    \b
    Examples:
      python -m examples.demo
      python -m examples.demo --quota gpuquota.yaml --pods deployment.yaml

    Exit status: 0 the server did its work, 1 it did not, 2 bad input.
    """
    try:
        entries = read_quota(quota).namespaces
        workloads = read_workloads([pods], "default")
    except BadInput as error:
        raise click.UsageError(str(error)) from error
    click.echo(f"Starting vcuda-webhook serve --standalone --quota {_short(quota)} --nodes {_short(nodes)}")
    with serving(quota, nodes) as connection:
        click.echo(f"It serves https://{connection.host}:{connection.port}, with a certificate made for this run.\n")
        for namespace, entry in entries.items():
            click.echo(f"{namespace} may use {_allowance(entry)}")
        click.echo(f"\nCreating the pods of {_short(pods)}, as the API server would: /mutate, then /validate\n")
        fates = [_create(connection, workload) for workload in workloads for _ in range(workload.count)]
    click.echo("\n".join(table(fates)))
    tally = ", ".join(f"{count} {decision}" for decision, count in Counter(fate.decision for fate in fates).items())
    click.echo(f"\n{len(fates)} pods: {tally}. The webhook has stopped.")


@contextmanager
def serving(quota: Path, nodes: Path) -> Iterator[http.client.HTTPSConnection]:
    """Run the server on a free port of 127.0.0.1, and yield a connection to it; it ends with the block.

    Raises:
        Misbehaved: it did not start, or ended with another status than 0.

    """
    program = Path(sysconfig.get_path("scripts"), "vcuda-webhook")
    files = ["--quota", str(quota), "--nodes", str(nodes)]
    command = [str(program), "serve", "--standalone", *files, "--bind", "127.0.0.1:0", "--drain-seconds", "0"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("VCUDA_")}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:  # noqa: S603  # ours
        try:
            with closing(_connect(process.stdout)) as connection:
                yield connection
        finally:
            status = _stop(process)
    if status:
        raise Misbehaved(f"the server ended with status {status}")


def _stop(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _connect(log: IO[bytes] | None) -> http.client.HTTPSConnection:
    """Read in the server's log where it listens and whom to trust; the rest of the log is thrown away."""
    told: dict[str, str] = {}
    for line in log or ():
        told |= {key: str(value) for key, value in msgspec.json.decode(line, type=Json).items()}
        if "url" in told:
            threading.Thread(target=deque, args=(log, 0), daemon=True).start()
            trust = ssl.create_default_context(cafile=told["ca"])
            host = urllib.parse.urlsplit(told["url"]).netloc
            return http.client.HTTPSConnection(host, context=trust, timeout=PATIENCE)
    raise Misbehaved("the server ended before it listened; what it said is above")


def _create(connection: http.client.HTTPSConnection, workload: Workload) -> Fate:
    """Take one pod through both webhooks."""
    proposal = _review(connection, "/mutate", workload, workload.pod)
    patch = msgspec.json.decode(base64.b64decode(proposal.get("patch", "")) or b"[]")
    verdict = proposal
    if proposal["allowed"]:
        patched: Manifest = jsonpatch.apply_patch(workload.pod, patch)
        stored = {**patched, "metadata": {**patched["metadata"], "uid": str(uuid.uuid4())}}
        verdict = _review(connection, "/validate", workload, stored)
    return _fate(workload, proposal, patch, verdict)


def _review(connection: http.client.HTTPSConnection, path: str, workload: Workload, pod: Manifest) -> Json:
    """Send one AdmissionReview, and return the response in its answer."""
    request = {
        "uid": str(uuid.uuid4()),
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "namespace": workload.namespace,
        "name": pod["metadata"].get("name", ""),
        "operation": "CREATE",
        "object": pod,
    }
    body = msgspec.json.encode({"apiVersion": API_VERSION, "kind": KIND, "request": request}, enc_hook=str)
    try:
        connection.request("POST", f"{path}?timeout=10s", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        answer = msgspec.json.decode(reply.read(), type=Json)
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise Misbehaved(f"{path}: no answer about {workload.name}: {error}") from error
    if reply.status != HTTPStatus.OK or answer["response"]["uid"] != request["uid"]:
        raise Misbehaved(f"{path}: HTTP {reply.status} about {workload.name}: {answer}")
    response: Json = answer["response"]
    return response


def _fate(workload: Workload, proposal: Json, patch: list[Json], verdict: Json) -> Fate:
    view = msgspec.convert(workload.pod, Pod)
    charge = read_request(view).charge
    notes = proposal.get("auditAnnotations", {})
    status = verdict.get("status", {})
    if not verdict["allowed"]:
        decision, stories = f"refused ({status['code']})", [status["message"]]
    elif notes or patch:
        decision, stories = "admitted", [notes.get("reason", ""), *patch_story(patch)]
    else:
        decision, stories = "untouched", ["its namespace has no limit" if asks_for_vcuda(view) else "asks for no GPU"]
    warnings = [f"warning to its owner: {warning}" for warning in verdict.get("warnings", ())]
    return Fate(
        pod=f"{workload.namespace}/{workload.name}",
        charge=str(charge) if charge.cores else "",
        decision=decision,
        model=notes.get("model", ""),
        stories=[story for story in [*stories, *warnings] if story],
    )


def table(fates: Sequence[Fate]) -> Iterator[str]:
    """Yield the lines of the table: a line for each pod, and under it why."""
    heading, *lines = aligned(
        [("POD", "ASKS FOR", "DECISION", "MODEL"), *((f.pod, f.charge, f.decision, f.model) for f in fates)]
    )
    yield heading
    for line, fate in zip(lines, fates, strict=True):
        yield line
        for story in fate.stories:
            yield from WRAPPER.wrap(story)


def _allowance(entry: NamespaceQuota) -> str:
    """Return a namespace's quota in words."""
    limits = [
        f"{cards(limit.cores)} of {model}" + (f" with {limit.memory} MiB" if limit.memory is not None else "")
        for model, limit in entry.limits.items()
    ]
    pools = f", in pool {' or '.join(entry.pools)}" if entry.pools else ""
    mode = "" if entry.mode is Mode.ENFORCE else f" (mode {entry.mode})"
    return f"{', '.join(limits) or 'no GPU'}{pools}{mode}"


def _short(path: Path) -> str:
    """Return the path as seen from here, where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    main()
