"""The teams of the playground: their quotas, their workloads, and the random changes of the workloads.

This module sends no requests to the API server.
"""

import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

CARD: Mapping[str, str] = {"nvidia.com/gpu": "1"}
HALF_CARD: Mapping[str, str] = {"nvidia.com/gpu": "1", "nvidia.com/gpucores": "50", "nvidia.com/gpumem": "7680"}

COMPLETES_AFTER = tuple(f"pod-complete.stage.kwok.x-k8s.io/{bound}" for bound in ("delay", "jitter-delay"))
"""The annotations by which kwok completes a Job's pod: the minimum and the maximum time that the pod runs."""

GRACE_SECONDS = 2
"""The grace period of each pod in seconds, for which the cards of a deleted pod stay charged."""

WAIT_SECONDS = 90
"""The seconds after which Kubernetes ends a Job, even one without pods. This limits the number of waiting Jobs."""

KEEP_SECONDS = 20
"""Seconds for which an ended Job is kept."""


@dataclass(frozen=True)
class Pods:
    """The pods of a workload.

    ``name``: the name of the Deployment, or the first part of the names of Jobs.
    ``limits``: the resource limits of each pod.
    ``size``: the limits in words.
    ``most``: the maximum number of pods at the same time. The quota may admit fewer pods.
    """

    name: str
    limits: Mapping[str, str]
    size: str
    most: int


@dataclass(frozen=True)
class Team:
    """A namespace with a quota and workloads.

    ``quota``: the number of cards by GPU model. Empty if the namespace shares the quota of `ROBOTICS`.
    ``deployment``: the pods of the team's Deployment, which is scaled between 0 and ``most`` pods.
    ``first``: the initial number of pods of the Deployment.
    ``job``: the pods of the team's Jobs. None for the user's team, whose workloads the playground does not change.
    """

    namespace: str
    quota: Mapping[str, int]
    deployment: Pods
    first: int
    job: Pods | None


TEAMS = (
    # The Deployment of team-vision exceeds its quota from the start, so that a user soon sees a rejected pod.
    Team("team-vision", {"A100": 5}, Pods("detector", CARD, "1 card", 7), 6, Pods("label", CARD, "1 card", 2)),
    Team(
        "team-speech",
        {"A100": 3, "T4": 4},
        Pods("transcribe", HALF_CARD, "half a T4 card", 10),
        4,
        Pods("train", CARD, "1 card", 3),
    ),
    Team(
        "team-lab",
        {"T4": 6},
        Pods("notebook", HALF_CARD, "half a T4 card", 14),
        6,
        Pods("sweep", HALF_CARD, "half a T4 card", 4),
    ),
)
YOURS = Team("your-team", {"T4": 2}, Pods("app", HALF_CARD, "half a T4 card", 1), 1, None)
"""The team of the user. The playground does not change its workloads."""

ROBOTICS, SHARED = "robotics", {"T4": 2}
"""The team whose namespaces share one quota, and this quota."""

SHARING = tuple(
    Team(f"{ROBOTICS}-{name}", {}, Pods("app", HALF_CARD, "half a T4 card", 1), 1, None) for name in ("dev", "train")
)
"""The namespaces of the team `ROBOTICS`. The playground does not change their workloads."""

ALL = (*TEAMS, *SHARING, YOURS)


@dataclass(frozen=True)
class Scale:
    """A change that scales a Deployment to another number of pods."""

    namespace: str
    deployment: str
    replicas: int


@dataclass(frozen=True)
class RunJob:
    """A change that creates a Job.

    ``pods``: the number of pods that the Job runs at the same time.
    ``seconds``: the seconds for which each pod runs.
    """

    namespace: str
    name: str
    limits: Mapping[str, str]
    pods: int
    seconds: int


Change = Scale | RunJob


def changes(seed: int) -> Iterator[Change]:
    """Yield the changes of all teams in turn, without end. The same seed yields the same changes."""
    figures = random.Random(seed)  # noqa: S311  # The numbers are sizes of workloads, not secrets.
    for number, team in enumerate(itertools.cycle(TEAMS)):
        yield next_change(team, number, figures)


def next_change(team: Team, number: int, figures: random.Random) -> Change:
    """Return a random change of a team: a new size of its Deployment, or a new Job with ``number`` in its name."""
    if team.job is None or figures.random() < 0.5:  # noqa: PLR2004  # Both kinds of change are equally likely.
        return Scale(team.namespace, team.deployment.name, figures.randint(0, team.deployment.most))
    name, pods = f"{team.job.name}-{number}", figures.randint(1, team.job.most)
    return RunJob(team.namespace, name, team.job.limits, pods, figures.randint(10, 40))


def quota_manifest() -> Json:
    """Return the quota ConfigMap. Its text has lines that a user can edit easily."""
    entries = "".join(f"{team.namespace}: {{quota: {{{quota_text(team)}}}}}\n" for team in ALL if team.quota)
    members = ", ".join(team.namespace for team in SHARING)
    teams = f"{ROBOTICS}: {{namespaces: [{members}], quota: {{{_cards(SHARED)}}}}}\n"
    models = "A100: [NVIDIA-A100-SXM4-40GB]\nT4: [NVIDIA-Tesla-T4]\n"
    metadata = {"namespace": "kube-system", "name": "gpuquota", "labels": {"quota.vcuda.io/config": "true"}}
    data = {"gpu_quota": entries, "gpu_teams": teams, "gpu_models": models}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def quota_text(team: Team) -> str:
    """Return the quota of a namespace as text, for example `A100: 3, T4: 4`."""
    return _cards(team.quota) or f"{_cards(SHARED)}, shared"


def _cards(quota: Mapping[str, int]) -> str:
    return ", ".join(f"{model}: {cards}" for model, cards in quota.items())


def namespace_manifest(team: Team) -> Json:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": team.namespace}}


def deployment_manifest(team: Team) -> Json:
    """Return the Deployment of a team with its initial number of pods."""
    labels = {"app": team.deployment.name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"namespace": team.namespace, "name": team.deployment.name},
        "spec": {
            "replicas": team.first,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _pod_spec(team.deployment.limits)},
        },
    }


def job_manifest(job: RunJob) -> Json:
    """Return a Job that ends by itself and is deleted soon after, even if none of its pods is ever admitted."""
    template = {
        "metadata": {"annotations": dict.fromkeys(COMPLETES_AFTER, f"{job.seconds}s")},
        "spec": {**_pod_spec(job.limits), "restartPolicy": "Never"},
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"namespace": job.namespace, "name": job.name},
        "spec": {
            "parallelism": job.pods,
            "completions": job.pods,
            "activeDeadlineSeconds": WAIT_SECONDS,
            "ttlSecondsAfterFinished": KEEP_SECONDS,
            "template": template,
        },
    }


def bare_pod(team: Team) -> Json:
    """Return a pod with the resource limits of the team's Deployment, but without an ownerReference."""
    metadata = {"namespace": team.namespace, "generateName": "trial-"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": _pod_spec(team.deployment.limits)}


def malformed_quota() -> Json:
    """Return a quota ConfigMap that the webhook rejects."""
    return {**quota_manifest(), "data": {"gpu_quota": "{team-vision: 8}"}}


def _pod_spec(limits: Mapping[str, str]) -> Json:
    container = {"name": "main", "image": "example.com/simulated", "resources": {"limits": dict(limits)}}
    return {"terminationGracePeriodSeconds": GRACE_SECONDS, "containers": [container]}
