"""Finds the pod templates in an object of any kind, each with the number of its pods that exist at the same time.

A PodTemplateSpec may be anywhere in the object. A field next to the template states the number of pods. These kinds
describe their pods in another way, so each of them has its own reader:

- ``InferenceService`` (KServe): each component is a pod spec with one container under the name of its runtime.
- ``LLMInferenceService`` (KServe): ``template`` is the pod spec of the leaders, and ``worker`` that of the workers.
- ``LeaderWorkerSet`` (lws): a group has one leader, and workers up to its ``size``.
- ``Workflow`` and its templates (Argo): each template has one ``container`` or ``script``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

Manifest = dict[str, Any]

MAX_TEMPLATE_PODS = 10_000
"""The maximum number of pods of one template."""
MAX_TEMPLATES = 1_000
"""The maximum number of pod templates of one object."""

ONE_UNLESS_STATED = frozenset(
    {
        *("InferenceService", "JobSet", "LeaderWorkerSet", "LLMInferenceService", "Notebook", "Rollout"),
        *("RayCluster", "RayJob", "RayService"),
        *("JAXJob", "MPIJob", "PaddleJob", "PyTorchJob", "TFJob", "XGBoostJob"),
    }
)
"""The kinds whose controllers create one pod for a pod template if the object states no number of pods."""

_WORKFLOWS = frozenset({"Workflow", "WorkflowTemplate", "ClusterWorkflowTemplate", "CronWorkflow"})
_COMPONENTS = ("predictor", "transformer", "explainer")
_INHERITED = ("nodeSelector", "affinity", "tolerations", "schedulerName", "volumes")
"""The fields of a Workflow's spec that also apply to the templates in the Workflow."""


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """A pod template of an object. ``metadata`` and ``spec`` are as written in the object."""

    path: str
    """The path of the template in the object, such as ``spec.pytorchReplicaSpecs.Worker.template``."""
    metadata: object
    spec: Manifest
    count: int | None
    """The number of pods that exist at the same time; None if the object does not state the number."""


def pod_templates(manifest: Manifest) -> list[PodTemplate]:
    """Return the pod templates of an object, in order. Raises ValueError for too many templates or an invalid count."""
    kind, spec = manifest["kind"], manifest.get("spec")
    readers = {
        "InferenceService": _in_inference_service,
        "LLMInferenceService": _in_llm_inference_service,
        "LeaderWorkerSet": _in_leader_worker_set,
    }
    reader = _in_workflow if kind in _WORKFLOWS else readers.get(kind, _anywhere)
    found: list[PodTemplate] = []
    for template in reader(spec) if isinstance(spec, dict) else ():
        if len(found) == MAX_TEMPLATES:
            raise ValueError(f"an object must not have more than {MAX_TEMPLATES} pod templates")
        number = 1 if template.count is None and kind in ONE_UNLESS_STATED else template.count
        found.append(replace(template, count=count(number)))
    return found


def _anywhere(spec: Manifest) -> Iterator[PodTemplate]:
    waiting: list[tuple[object, str, int | None]] = [(spec, "spec", None)]
    while waiting:
        value, path, factor = waiting.pop()
        if isinstance(value, list):
            waiting += reversed([(each, f"{path}[{index}]", factor) for index, each in enumerate(value)])
        if not isinstance(value, dict):
            continue
        inner: list[tuple[object, str, int | None]] = []
        for key, child in value.items():
            child_spec = child.get("spec") if isinstance(child, dict) else None
            if not isinstance(child_spec, dict):
                inner.append((child, f"{path}.{key}", factor))
            elif "containers" in child_spec:
                yield PodTemplate(f"{path}.{key}", child.get("metadata"), child_spec, _times(factor, at_once(value)))
            else:
                # A spec without containers describes other objects, for example Jobs, with pod templates of their own.
                inner.append((child_spec, f"{path}.{key}.spec", _times(factor, at_once(value))))
        waiting += reversed(inner)


def _times(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one * other


def at_once(fields: Mapping[str, object]) -> int | None:
    """Return the number of pods in the ``fields`` next to a template; None if there is no number. Raises ValueError."""
    replicas, hosts = count(fields.get("replicas")), count(fields.get("numOfHosts"))
    if replicas is not None:
        return replicas if hosts is None else replicas * hosts
    parallelism, completions = count(fields.get("parallelism")), count(fields.get("completions"))
    if parallelism is None:
        # A Job without parallelism runs one pod at a time. The number of completions does not change this.
        return None if completions is None else 1
    return parallelism if completions is None else min(parallelism, completions)


def count(value: object) -> int | None:
    """Return ``value`` if it is a valid number of pods, or None. Raises ValueError for any other value."""
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MAX_TEMPLATE_PODS:
        raise ValueError(f"the number of pods must be between 0 and {MAX_TEMPLATE_PODS}; got {value!r}")
    return value


def _in_leader_worker_set(spec: Manifest) -> Iterator[PodTemplate]:
    group = _mapping(spec, "leaderWorkerTemplate")
    worker = _mapping(group, "workerTemplate")
    leader = _mapping(group, "leaderTemplate") or worker
    groups, size = count(spec.get("replicas")), count(group.get("size"))
    groups, size = 1 if groups is None else groups, 1 if size is None else size
    for name, template, number in (("leader", leader, groups), ("worker", worker, groups * max(size - 1, 0))):
        if template and number:
            path = f"spec.leaderWorkerTemplate.{name}Template"
            yield PodTemplate(path, template.get("metadata"), _mapping(template, "spec"), number)


def _in_inference_service(spec: Manifest) -> Iterator[PodTemplate]:
    for name in _COMPONENTS:
        component = _mapping(spec, name)
        for path, pod, number in (
            (name, component, count(component.get("minReplicas"))),
            (f"{name}.workerSpec", _mapping(component, "workerSpec"), None),
        ):
            if containers := _containers_of(pod):
                # With ``minReplicas`` 0, a component creates its pods at the first request. So their number is unknown.
                metadata = {"labels": pod.get("labels"), "annotations": pod.get("annotations")}
                yield PodTemplate(f"spec.{path}", metadata, {**pod, "containers": containers}, number or None)


def _in_llm_inference_service(spec: Manifest) -> Iterator[PodTemplate]:
    for path, workload in (("spec", spec), ("spec.prefill", _mapping(spec, "prefill"))):
        split = _mapping(workload, "parallelism")
        data, local = count(split.get("data")), count(split.get("dataLocal"))
        size = (data // (local or 1) if data else count(split.get("pipeline"))) or 1
        stated = workload.get("replicas", _mapping(workload, "scaling").get("minReplicas"))
        groups = 1 if stated is None else count(stated) or 0
        metadata = {key: workload[key] for key in ("annotations", "labels") if key in workload}
        for name, number in (("template", groups), ("worker", groups * (size - 1))):
            pod = _mapping(workload, name)
            if "containers" in pod and (number or name == "template"):
                yield PodTemplate(f"{path}.{name}", metadata, pod, number)


def _containers_of(component: Manifest) -> list[object]:
    given = component.get("containers")
    runtimes = [
        {"name": name, **each}
        for name, each in component.items()
        if isinstance(each, dict)
        and name != "workerSpec"
        and {"resources", "image", "modelFormat", "storageUri"} & each.keys()
    ]
    return [*(given if isinstance(given, list) else ()), *runtimes]


def _in_workflow(spec: Manifest) -> Iterator[PodTemplate]:
    inner = _mapping(spec, "workflowSpec")
    spec, path = (inner, "spec.workflowSpec") if inner else (spec, "spec")
    templates = spec.get("templates")
    for index, template in enumerate(templates if isinstance(templates, list) else ()):
        if not isinstance(template, dict):
            continue
        several = _mapping(template, "containerSet").get("containers")
        containers = [each for key in ("container", "script") if (each := _mapping(template, key))]
        containers += several if isinstance(several, list) else []
        if containers:
            sidecars = template.get("sidecars")
            containers += sidecars if isinstance(sidecars, list) else []
            inherited = {key: spec[key] for key in _INHERITED if key in spec}
            pod = {**inherited, **template, "containers": containers}
            # The number of pods is unknown, because a Workflow may run a step many times, in parallel or in sequence.
            yield PodTemplate(f"{path}.templates[{index}]", template.get("metadata"), pod, None)


def _mapping(parent: Manifest, field: str) -> Manifest:
    value = parent.get(field)
    return value if isinstance(value, dict) else {}
