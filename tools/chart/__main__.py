"""``python -m tools.chart``: writes manifests/chart/templates from the kustomize base and its components."""

from collections.abc import Iterator, Mapping

from tools.chart.features import CHART, COMPONENTS, Identity, Json, Objects, render
from tools.chart.merge import ABSENT, condition_of, merge
from tools.chart.names import rename
from tools.chart.template import MARKS, lookup, write_object
from tools.chart.values import values_of

HEADER = "{{- /* Written by `make chart` from manifests/base and manifests/components. Edit those. */ -}}\n"

_FILES: Mapping[str, tuple[str, ...]] = {
    "namespaces": ("Namespace", "ResourceQuota"),
    "rbac": ("ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"),
    "network-policies": ("NetworkPolicy",),
    "flow-control": ("FlowSchema", "PriorityLevelConfiguration"),
    "policies": ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    "registration": ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"),
    "certificates": ("Certificate", "Issuer"),
    "monitoring": ("ServiceMonitor", "PodMonitor", "PrometheusRule"),
    "workloads": ("Deployment", "DaemonSet", "CronJob", "Job", "Service", "PodDisruptionBudget", "ConfigMap", "Secret"),
}
"""The kinds of Kubernetes objects in each template file."""


def templates() -> dict[str, str]:
    """Return the text of each generated file in the chart's directory ``templates``."""
    base, variants = render(), {component: render(component) for component in COMPONENTS}
    texts: dict[str, list[str]] = {}
    for found in dict.fromkeys((*base, *(each for objects in variants.values() for each in objects))):
        texts.setdefault(_file_of(found), []).extend(_lines(found, base, variants))
    return {f"{name}.yaml": HEADER + "\n".join(lines) + "\n" for name, lines in texts.items()}


def _file_of(found: Identity) -> str:
    return next(name for name, kinds in _FILES.items() if found.kind in kinds)


def _lines(found: Identity, base: Objects, variants: Mapping[str, Objects]) -> Iterator[str]:
    own = _marked(base.get(found, ABSENT))
    by_component = {component: _marked(objects.get(found, ABSENT)) for component, objects in variants.items()}
    some = next(each for each in (own, *by_component.values()) if each is not ABSENT)
    filled = lookup(tuple(values_of(found, some)), found.kind, found.name)
    yield from write_object(merge(own, by_component), condition_of(own, by_component), filled)


def _marked(found: Json) -> Json:
    """Return the object with the placeholders `MARKS` in place of the names that users of the chart can choose."""
    return found if found is ABSENT else rename(found, MARKS)


def main() -> None:
    directory = CHART / "templates"
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in templates().items():
        (directory / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
