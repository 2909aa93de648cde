"""Runs the commands in the pages of docs/, exactly as they are there, against an installed system."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.installation import LEDGERS, await_enforced, charged
from tests.e2e.ledgers import ledger_in
from tests.e2e.manifests.system import CONTROLLER, System, applied
from tests.e2e.quota_config import QuotaConfigMap
from tests.kubectl import kubectl
from tests.processes import SCRIPTS, ControllerProcess
from tests.rendered import MANIFESTS

TEAM = "team-a"
ROOT = MANIFESTS.parent
DOCS = ROOT / "docs"
EXAMPLE = MANIFESTS / "examples" / "gpuquota.yaml"
NOTHING = "No resources found"
SOON = {"storable_seconds": "5"}
"""Flags of a controller that rebuilds a lost ledger 17 seconds after it was found missing, instead of 87."""
REGISTERED = "mutatingwebhookconfigurations,validatingwebhookconfigurations"


def commands(heading: str) -> list[str]:
    """Return the shell code blocks of the docs' section with this heading, without those of its subsections."""
    pages = (page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    found = [re.split(rf"^##+ {heading}\n", page, flags=re.MULTILINE)[1:] for page in pages]
    [section] = [section for sections in found for section in sections]
    own = re.split(r"^##+ ", section, flags=re.MULTILINE)[0]
    return re.findall(r"^ *```sh\n(.*?)^ *```$", own, re.MULTILINE | re.DOTALL)


def run(system: System, script: str) -> str:
    """Run commands of docs/ in a shell, and return the output. They use the directory or chart that was applied."""
    done = _typed(system, script)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def apply_again(system: System) -> None:
    """Run the page's command that applies the system again, by the tool that installed it."""
    with_helm, with_kustomize = commands("Apply the manifests again")
    run(system, with_helm if system.chart else with_kustomize)


def rejected_run(system: System, script: str) -> str:
    """Run commands of docs/ in a shell, and return the error output. One of the commands must fail."""
    done = _typed(system, script)
    assert done.returncode != 0, done.stdout
    return done.stderr


def _typed(system: System, script: str) -> subprocess.CompletedProcess[str]:
    program = Path(kubectl())  # without kubectl, the test is skipped here
    system.directory.mkdir(exist_ok=True)
    home = {"HOME": str(system.directory), "KUBECONFIG": str(system.cluster.kubeconfig)}
    typed = script.replace("manifests/base", str(system.kustomization)).replace("manifests/chart", str(system.chart))
    if system.helm == "helm3":
        typed = typed.replace("helm ", "helm3 ").replace(" --force-conflicts", "")
    return subprocess.run(
        ("sh", "-ec", typed),
        cwd=system.directory,
        env={**os.environ, **home, "PATH": f"{SCRIPTS}{os.pathsep}{program.parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def limit(admin: Cluster) -> None:
    """Create the namespace `TEAM`, apply the README's example quota, and wait until its limits are enforced.

    An earlier test may have used a namespace of this name. So wait also until the ledger charges none of its pods.
    """
    admin.create_namespace(TEAM)
    await_enforced(admin, TEAM, enforced=False)
    admin.kubectl("apply", "-f", str(EXAMPLE))
    await_enforced(admin, TEAM)
    admin.await_collection(
        LEDGERS,
        lambda found: not any(charged(ledger_in(found)).values()),
        fieldSelector=f"metadata.name=gpu-ledger-{TEAM}",
    )


@contextmanager
def example_quota(admin: Cluster) -> Iterator[None]:
    """Do `limit`. At the end of the ``with`` statement, delete the quota, and wait until the namespace is deleted."""
    try:
        limit(admin)
        yield
    finally:
        QuotaConfigMap(admin.rest, "kube-system", "gpuquota").delete()
        admin.delete_namespace(TEAM)
        admin.await_gone("/api/v1/namespaces", TEAM)


@contextmanager
def installed(
    admin: Cluster, directory: Path, *components: str, program: Sequence[str | Path] = CONTROLLER, **flags: str
) -> Iterator[tuple[System, ControllerProcess]]:
    """Apply the manifests and run the system. The example quota is in force in the new namespace `TEAM`.

    ``program``: the command of the controller, without its arguments. ``flags`` override the flags of the manifests.
    """
    directory.mkdir()
    # `kubectl apply` would keep some objects of the previous installation: the webhooks with their old CA, and the
    # roles of components that this installation does not have. So delete these objects.
    admin.kubectl(
        "delete", f"{REGISTERED},clusterrolebindings,clusterroles", "-l", "app.kubernetes.io/part-of=vcuda-quota"
    )
    with (
        applied(admin, directory, *components) as system,
        system.serving(1),
        system.controller(program, **flags) as controller,
    ):
        controller.await_synced()
        with example_quota(admin):
            yield system, controller
