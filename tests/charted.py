"""The objects that the Helm chart renders, and the errors with which helm rejects values."""

from collections.abc import Mapping, Sequence

import yaml

from tests.helm import APIS, templated
from tests.rendered import Json
from tools.chart.features import COMPONENTS, Identity, Objects, identity_of

KUSTOMIZED_SCHEDULER = "scheduler.image=registry.k8s.io/kube-scheduler:v1.31.0"
"""The value with which the chart's scheduler has the image of the kustomize component."""


def setting_of(component: str) -> str:
    return f"{COMPONENTS[component].removeprefix('.Values.')}=true"


def objects(text: str) -> dict[Identity, Json]:
    return {identity_of(found): found for found in yaml.safe_load_all(text) if found}


def charted(*settings: str, name: str = "helm") -> dict[Identity, Json]:
    return {each: found for each, found in whole_chart(*settings, name=name).items() if not is_of_a_hook(found)}


def whole_chart(*settings: str, name: str = "helm") -> dict[Identity, Json]:
    done = templated(settings, name=name)
    assert done.returncode == 0, done.stderr
    return objects(done.stdout)


def is_of_a_hook(found: Json) -> bool:
    return "helm.sh/hook" in found["metadata"].get("annotations", {})


def rejection(*settings: str, name: str = "helm", apis: Sequence[str] = APIS) -> str:
    done = templated(settings, name=name, apis=apis)
    assert done.returncode != 0, done.stdout
    return done.stderr


def unlike(one: Objects, other: Objects) -> Mapping[Identity, tuple[Json | None, Json | None]]:
    return {each: (one.get(each), other.get(each)) for each in {*one, *other} if one.get(each) != other.get(each)}
