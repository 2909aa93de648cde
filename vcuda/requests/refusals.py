"""What gives a pod a GPU beside what is counted, or takes the limits off the share that it asks for.

A variable of the image, or from a ConfigMap by ``envFrom``, cannot be seen in a pod; nor can what a host path holds.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from vcuda.errors import Fault
from vcuda.k8s_types import Container, Pod
from vcuda.quota.model import Allowance
from vcuda.requests.pod_request import NONE, PodRequest, resources_of
from vcuda.requests.resources import NOT_FIXED, GpuResources, unit_name
from vcuda.requests.schemes import Scheme

GPU_RUNTIME_CLASSES = frozenset({"nvidia"})
"""The runtime classes that give a container the cards its variables name, unless somebody says otherwise."""

VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
NO_DEVICES = ("none", "void")
"""Of its values the two that give no card (nvidia-container-toolkit); one by ``valueFrom`` is not known."""

# HAMi-core's switches (docs/config.md). Releases differ in which values of the first turn it off, so any does here; a
# value that is not in the pod itself is not known.
DISABLE_CONTROL = "CUDA_DISABLE_CONTROL"
CORE_POLICY = "GPU_CORE_UTILIZATION_POLICY"
CORE_POLICIES = ("", "default", "force")

# vgpu-manager's (pkg/util/consts.go), under whatever domain it is configured for.
COMPUTE_POLICY = "/vgpu-compute-policy"
COMPUTE_POLICIES = ("", "fixed", "balance")

KAI = {"gpu-fraction": Allowance.GPU_FRACTION, "gpu-memory": Allowance.GPU_MEMORY}
"""The annotations by which KAI's pods ask for a share of a card (KAI-Scheduler, pkg/common/constants)."""


class Refusal(NamedTuple):
    """A fault, and the name by which a quota may allow it all the same; None: it may not."""

    path: str
    message: str
    allowance: Allowance | None = None

    @property
    def fault(self) -> Fault:
        """The fault as it is told, with the name, since the pod's owner may have to ask for it."""
        allowed = f", or have the quota say allow: [{self.allowance}]" if self.allowance else ""
        return Fault(self.path, f"{self.message}{allowed}")


def could_reach_gpus(pod: Pod) -> bool:
    """Return whether it asks for anything, in any way, that could be a GPU; for the others nothing is to be decided."""
    spec = pod.spec
    if spec.runtime_class_name or spec.resource_claims or not KAI.keys().isdisjoint(pod.annotations):
        return True
    for containers in (spec.containers, spec.init_containers):
        for container in containers or ():
            if _is_privileged(container) or (container.resources and "/" in "".join(resources_of(container))):
                return True
            # The other variables that are refused matter beside a resource alone.
            for variable in container.env or ():
                if variable.name == VISIBLE_DEVICES:
                    return True
    return False


def find_refusals(
    pod: Pod,
    request: PodRequest,
    known: GpuResources,
    runtime_classes: Collection[str] = GPU_RUNTIME_CLASSES,
    extended: Collection[str] | None = None,
) -> Iterator[Refusal]:
    """Yield what is refused of a pod besides the faults of its request, each with its path.

    ``extended`` are the resources by which devices of a DeviceClass are asked for; None: claims are not counted.
    """
    spec = pod.spec
    if spec.resource_claims and extended is None:
        yield Refusal("spec.resourceClaims", "the devices of a ResourceClaim are not counted; ask by a resource")
    if spec.runtime_class_name and spec.runtime_class_name in runtime_classes and not request.asks:
        message = f"runtime class {spec.runtime_class_name} gives a pod cards that it does not ask for; ask for a GPU"
        yield Refusal("spec.runtimeClassName", message, Allowance.RUNTIME_CLASS)
    if len({scheme.scheduler for scheme in request.schemes if scheme.scheduler}) > 1:
        names = " and ".join(scheme.name for scheme in request.schemes)
        yield Refusal("spec.schedulerName", f"asks by {names}, which have a scheduler each; ask by one of them")
    for path, container in pod.all_containers():
        yield from _of_container(path, container, request, known, extended or (), claims=bool(spec.resource_claims))
    for key in pod.annotations:
        if key in KAI:
            message = "a share that is asked for by an annotation is not counted; ask by a resource"
            yield Refusal(f"metadata.annotations[{key}]", message, KAI[key])
    # What its claims give is read where they are created; one that it names may not be there yet.
    if request.has_share or spec.resource_claims:
        yield from find_unlimited(pod.annotations)


def find_unlimited(annotations: Mapping[str, str]) -> Iterator[Refusal]:
    """Yield the annotations that take the limit off a share: of a pod, or of the claim that the share is given by.

    vgpu-manager's DRA driver reads them from the claim (`getComputePolicy` in pkg/kubeletplugin/vgpu.go).
    """
    for key, value in annotations.items():
        if key.endswith(COMPUTE_POLICY) and value.strip().casefold() not in COMPUTE_POLICIES:
            message = f"{value!r} takes the limit off a share of a card; write fixed or balance"
            yield Refusal(f"metadata.annotations[{key}]", message, Allowance.COMPUTE_POLICY)


def _of_container(
    path: str,
    container: Container,
    request: PodRequest,
    known: GpuResources,
    extended: Collection[str],
    *,
    claims: bool,
) -> Iterator[Refusal]:
    # By a claim it may have a share, too, which HAMi's library limits by the same variables.
    share = request.has_share or claims
    asked = [name for name, quantity in resources_of(container).items() if quantity not in NONE]
    without_count = _without_count(asked, known)
    for name in asked:
        scheme = _uncounted(without_count, name, known) if without_count else None
        # A DeviceClass may give its devices any name.
        of_class = name in extended and name not in known.scheme_of and known.unit_of(name) is None
        if scheme or of_class or known.is_unknown_gpu(name):
            yield Refusal(
                f"{path}.resources.limits[{name}]", _how_to_name(name, scheme) if scheme else _how_to_count(name)
            )
    if _is_privileged(container):
        message = "a privileged container sees every card of its node; write false"
        yield Refusal(f"{path}.securityContext.privileged", message, Allowance.PRIVILEGED)
    for index, variable in enumerate(container.env or ()):
        value = variable.value or ""
        field = f"{path}.env[{index}]"
        if variable.name == VISIBLE_DEVICES and value not in NO_DEVICES:
            message = (
                f"{VISIBLE_DEVICES} gives cards that the pod does not ask for; leave it out, or write none or void"
            )
            yield Refusal(field, message, Allowance.VISIBLE_DEVICES)
        elif variable.name == DISABLE_CONTROL and (request.asks or claims):
            message = f"{DISABLE_CONTROL} takes all limits off a share of a card; leave it out"
            yield Refusal(field, message, Allowance.DISABLE_CONTROL)
        elif variable.name == CORE_POLICY and share and (variable.value is None or _is_off(value)):
            message = f"{CORE_POLICY} takes the limit off a share of a card; leave it out, or write default or force"
            yield Refusal(field, message, Allowance.CORE_POLICY)


def _is_off(policy: str) -> bool:
    return policy.strip().casefold() not in CORE_POLICIES


def _is_privileged(container: Container) -> bool:
    return container.security_context is not None and bool(container.security_context.privileged)


def _without_count(asked: Collection[str], known: GpuResources) -> list[Scheme]:
    """Return the schemes whose cores or memory are asked for, and whose count is not."""
    schemes = dict.fromkeys(known.scheme_of[name] for name in asked if name in known.scheme_of)
    return [scheme for scheme in schemes if scheme.count and scheme.count not in asked]


def _uncounted(schemes: Collection[Scheme], name: str, known: GpuResources) -> Scheme | None:
    """Return the one of these schemes whose count this may be by another name."""
    # The vendor gives so many times the share beside it, whatever one of the resource is said to be worth.
    if name in known.scheme_of or not (known.is_unknown_gpu(name) or name in known.own_units):
        return None
    domain = name.partition("/")[0]
    return next((scheme for scheme in schemes if scheme.count and scheme.count.startswith(f"{domain}/")), None)


def _how_to_name(resource: str, scheme: Scheme) -> str:
    return (
        f"this may be the count of {scheme.name} by another name; have it said in key gpu_schemes of the quota "
        f"ConfigMap: `{scheme.name}: {{resources: {{count: {resource}}}}}`"
    )


def _how_to_count(resource: str) -> str:
    name = unit_name(resource)
    if name in NOT_FIXED:
        return NOT_FIXED[name]
    return (
        "this may be a GPU, and nothing says what one is worth; have a line added to key gpu_units of the quota "
        f"ConfigMap: `{name}: {{cards: 1}}` with the cards that one is worth, or `{name}: {{}}` if it is none"
    )
