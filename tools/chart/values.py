"""The fields of the manifests that the Helm chart fills from its values."""

import functools
import json
from collections.abc import Iterator

from tools.chart.features import Identity, Json
from tools.chart.template import Value

_RESOURCES = "KEY: {{- toYaml .Values.%s.resources | nindent %d }}"
_IMAGE = (
    'KEY: {{ include "vcuda-quota.image" . | quote }}',
    "{{- with .Values.image.pullPolicy }}",
    "imagePullPolicy: {{ . }}",
    "{{- end }}",
)
_SCHEDULER = 'KEY: {{ include "vcuda-quota.scheduler-image" . | quote }}'
_PROXY_LABELS = ('KEY: {{- include "vcuda-quota.proxy-labels" . | nindent 10 }}',)
_LINKS = {"docs": "docsUrl", "grafana": "grafanaUrl"}
"""The controller's flags ``--ui-…-url`` for links on the usage page, each with the chart's value that sets the flag."""
_EXTRA_ARGS = ("{{- range .Values.%s.extraArgs }}", "- {{ . | quote }}", "{{- end }}")
_PLACEMENT = ("nodeSelector", "tolerations", "affinity")
_MONITORING = ("KEY: {{ .Values.prometheus.namespace }}",)
_PEER = ("spec", "ingress", "*", "from", "*")
_FROM = (*_PEER, "namespaceSelector", "matchLabels", "kubernetes.io/metadata.name")

OWN = {"vcuda-webhook": "webhook", "vcuda-controller": "controller"}
"""The Deployments whose settings are in the chart's values, each with the name of its section in the values."""
FIRST = "-first"
"""The suffix in the name of a Job that runs once after the manifests are applied."""


def values_of(found: Identity, manifest: Json) -> Iterator[Value]:
    """Yield the fields of an object that the Helm chart fills from its values.

    ``manifest``: the object in the kustomize base, or in a component that adds it.
    """
    here = (found.kind, found.name)
    if found.kind == "Job" and found.name.endswith(FIRST):
        # The API server rejects changes of a Job's pod template. So each upgrade creates a Job with another name.
        named = f'KEY: {found.name}{{{{ include "vcuda-quota.job-suffix" . }}}}'
        yield Value(*here, ("metadata", "name"), (named,))
    if found.kind in _POD_PATHS:
        yield from _of_pods(here, manifest)
    if section := OWN.get(found.name) if found.kind == "Deployment" else None:
        yield from _of_section(here, section)
    if found.api.startswith("monitoring.coreos.com/"):
        yield Value(*here, ("metadata", "labels"), _with(".Values.prometheus.labels", "", 4), replaces=False)
    if found.kind == "ConfigMap" and found.namespace == "monitoring":
        yield Value(*here, ("metadata", "namespace"), _MONITORING)
    if found.kind == "NetworkPolicy" and found.name.endswith("-metrics"):
        yield Value(*here, _FROM, _MONITORING)
    if found.kind == "NetworkPolicy" and found.name == "vcuda-page":
        yield Value(*here, _FROM, ("KEY: {{ .Values.page.proxy.namespace }}",))
        yield Value(*here, (*_PEER, "podSelector", "matchLabels"), _PROXY_LABELS)


_POD_PATHS = {
    "Deployment": ("spec", "template", "spec"),
    "DaemonSet": ("spec", "template", "spec"),
    "Job": ("spec", "template", "spec"),
    "CronJob": ("spec", "jobTemplate", "spec", "template", "spec"),
}


def _of_pods(here: tuple[str, str], manifest: Json) -> Iterator[Value]:
    path = _POD_PATHS[here[0]]
    spec = manifest
    for key in path:
        spec = spec[key]
    indent, agent = 2 * len(path) + 2, here[0] == "DaemonSet"
    source = functools.partial(_source, "nodeAgent" if agent else OWN.get(here[1], "pods"))
    placed = [*_with(".Values.image.pullSecrets", "imagePullSecrets: ", indent)]
    for key in _PLACEMENT[2:] if agent else _PLACEMENT:
        placed += _with(source(key), f"{key}: ", indent)
    yield Value(*here, (*path, "serviceAccountName"), tuple(placed), replaces=False)
    yield Value(*here, (*path, "priorityClassName"), (f"KEY: {{{{ {source('priorityClassName')} }}}}",))
    annotations = _with(source("podAnnotations"), "annotations: ", indent)
    yield Value(*here, (*path[:-1], "metadata", "labels"), annotations, replaces=False)
    if agent:
        vendors = " ".join(json.dumps(text) for pair in spec["nodeSelector"].items() for text in pair)
        merged = f"merge (deepCopy {source('nodeSelector')}) (dict {vendors})"
        yield Value(*here, (*path, "nodeSelector"), (f"KEY: {{{{- toYaml ({merged}) | nindent {indent} }}}}",))
        yield Value(
            *here, (*path, "tolerations"), (f"KEY: {{{{- toYaml {source('tolerations')} | nindent {indent} }}}}",)
        )
    for container in spec["containers"]:
        lines = (_SCHEDULER,) if "kube-scheduler" in container["image"] else _IMAGE
        yield Value(*here, (*path, "containers", container["name"], "image"), lines)


def _source(section: str, key: str) -> str:
    """Return the template's expression for a setting of pods. The section ``pods`` has defaults for our Deployments."""
    own = f".Values.{section}.{key}"
    return own if section in ("pods", "nodeAgent") else f"{own} | default .Values.pods.{key}"


def _with(source: str, begin: str, indent: int) -> tuple[str, ...]:
    """Return template lines that write a list or mapping of the chart's values, if it is not empty."""
    value = f"{{{{- toYaml . | nindent {indent} }}}}"
    return f"{{{{- with {source} }}}}", f"{begin}{value}", "{{- end }}"


def _of_section(here: tuple[str, str], section: str) -> Iterator[Value]:
    pod = _POD_PATHS[here[0]]
    container = (*pod, "containers", section)
    yield Value(*here, ("spec", "replicas"), (f"KEY: {{{{ .Values.{section}.replicas }}}}",))
    yield Value(*here, (*container, "resources"), (_RESOURCES % (section, 2 * len(container) + 2),))
    extra = (line.replace("%s", section) for line in _EXTRA_ARGS)
    yield Value(*here, (*container, "args", "-"), (*(_links() if section == "controller" else ()), *extra))


def _links() -> Iterator[str]:
    for flag, value in _LINKS.items():
        yield f"{{{{- with .Values.page.{value} }}}}"
        yield f'- {{{{ printf "--ui-{flag}-url=%s" . | quote }}}}'
        yield "{{- end }}"
