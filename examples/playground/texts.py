"""The texts that the playground prints. This module sends no requests to the API server."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from examples.playground.teams import ALL, ROBOTICS, SHARING, YOURS, Team, quota_text
from vcuda.cli import aligned


class Command(NamedTuple):
    """A command that the user can try, and a text about what the command shows."""

    shows: str
    typed: str


_APP = f"deployment/{YOURS.deployment.name}"
_OTHER, _MEMBER = (team.namespace for team in SHARING)

COMMANDS = (
    Command("See what each team uses, and what is free", "kubectl gpuquota -A"),
    Command("See which workloads were rejected, and why", "kubectl gpuquota rejections -A"),
    Command(
        "Scale your Deployment to 6 half cards, of which your quota admits 4",
        f"kubectl -n {YOURS.namespace} scale {_APP} --replicas=6",
    ),
    Command("See why two pods of your Deployment are missing", f"kubectl gpuquota why {_APP} -n {YOURS.namespace}"),
    Command(
        f"Raise the quota of {YOURS.namespace} to T4: 4, so that the missing pods start by themselves",
        "kubectl -n kube-system edit configmap gpuquota",
    ),
    Command(
        f"Scale a Deployment to 6 half cards. Its namespace shares 2 cards with {_OTHER}, which uses half a card",
        f"kubectl -n {_MEMBER} scale deployment/app --replicas=6",
    ),
    Command(f"See what the namespace and its team {ROBOTICS} use", f"kubectl gpuquota -n {_MEMBER}"),
    Command(
        f"Free half a card in {_OTHER}, so that one more pod starts in {_MEMBER}",
        f"kubectl -n {_OTHER} scale deployment/app --replicas=0",
    ),
)


def welcome(directory: Path, commands: Path, page: str) -> str:
    """Return the text with all that users need: the teams, the usage page, environment variables and commands.

    ``directory``: the directory with the file kubeconfig.
    ``commands``: the directory with kubectl and its plugin.
    ``page``: the address of the usage page.
    """
    cache = directory / "kubectl-cache"
    return "\n".join(
        (
            "",
            *_table(ALL),
            "",
            "The usage page:",
            f"    {page}",
            "",
            "In another terminal:",
            f"    export KUBECONFIG={directory / 'kubeconfig'} KUBECACHEDIR={cache}",
            f"    export PATH={commands}:$PATH",
            "",
            *(line for command in COMMANDS for line in (f"{command.shows}:", f"    {command.typed}")),
            "",
        )
    )


def _table(teams: tuple[Team, ...]) -> Iterator[str]:
    rows = ((team.namespace, quota_text(team), _deployment(team), _jobs(team)) for team in teams)
    return aligned([("NAMESPACE", "QUOTA", "DEPLOYMENT", "JOBS"), *rows])


def _deployment(team: Team) -> str:
    pods = team.deployment
    span = f"0 to {pods.most} pods" if team.job else "yours to scale"
    return f"{pods.name}: {span}, {pods.size} each"


def _jobs(team: Team) -> str:
    return f"{team.job.name}-N: up to {team.job.most} pods, {team.job.size} each" if team.job else ""


def verdict(running: int, rejected: int) -> str | None:
    """Return an error message if no pod was admitted, or if no pod was rejected. Return None if both happened.

    ``running``: the number of the teams' running pods.
    ``rejected``: the number of the teams' workloads with a rejected pod.
    """
    if not running:
        return "no pod of a team was admitted"
    return None if rejected else "no pod of a team was rejected"
