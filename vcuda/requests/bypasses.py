"""Finds fields of a pod that give the pod unrequested GPUs, or that lift the limits of the pod's share of a card.

Three things are not checked, because the pod object does not contain them: variables of the image, variables from a
ConfigMap by ``envFrom``, and the content of a host path.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from vcuda.errors import Fault, cut
from vcuda.k8s_types import Container, EnvVar, Pod, SecurityContext
from vcuda.quota.allowances import Allowance
from vcuda.requests import runtime_devices
from vcuda.requests.mig import PROFILE, unknown_profile
from vcuda.requests.pod_request import NONE, PodRequest, resources_of
from vcuda.requests.resources import NOT_FIXED, GpuResources, unit_name
from vcuda.requests.runtime_devices import RuntimeClasses
from vcuda.requests.schemes import Scheme
from vcuda.requests.share_limits import LimitVariable, ShareLimits

COMPUTE_POLICY = "/vgpu-compute-policy"
"""The key, without its configurable domain, of the annotation by which a pod sets how vgpu-manager limits its cores
(pkg/util/consts.go)."""
COMPUTE_POLICIES = ("", "fixed", "balance")

KAI = {"gpu-fraction": Allowance.GPU_FRACTION, "gpu-memory": Allowance.GPU_MEMORY}
"""The annotations by which pods request a share of a card from KAI (KAI-Scheduler, pkg/common/constants). Letter case
is ignored, because other admission webhooks may copy an annotation with another letter case."""

EFFECTS: Mapping[Allowance, str] = {
    Allowance.DISABLE_CONTROL: "the variable turns off all limits of a share of a card",
    Allowance.CORE_POLICY: "the variable turns off the core limit of a share of a card",
    Allowance.CORE_LIMIT: "the variable changes the core limit of a share of a card",
    Allowance.MEMORY_LIMIT: "the variable changes the memory limit of a share of a card",
    Allowance.LIMIT_LIBRARY: "the variable can replace the library that limits a share of a card",
}
"""The effects of environment variables on a share of a card, by the item of `allow` that permits the effect."""


class Bypass(NamedTuple):
    """A way around the quota, for which a pod is rejected. ``allowance``: the item of ``allow`` in a quota with which
    the pod would be admitted; None if no item would help."""

    path: str
    message: str
    allowance: Allowance | None = None

    @property
    def fault(self) -> Fault:
        """The bypass as a `Fault`, with advice to the user: the item of ``allow`` that would help."""
        if self.allowance is None:
            return Fault(self.path, self.message)
        advice = f"Or ask your administrator to add `allow: [{self.allowance}]` to the quota of this namespace"
        return Fault(self.path, f"{self.message}. {advice}")


class _Judge(NamedTuple):
    """The rules that apply to all containers of one pod."""

    known: GpuResources
    extended: Collection[str]
    """The extended resources for which the scheduler allocates devices of a DeviceClass."""
    limits: tuple[ShareLimits, ...]


def could_reach_gpus(pod: Pod) -> bool:
    """Return whether a pod could get a GPU through any field. If not, the pod is admitted without further checks.

    The matchConditions in manifests/base/registration.yaml must match every pod for which this function returns True.
    """
    spec = pod.spec
    if spec.runtime_class_name or spec.resource_claims or _privilege_of(spec.security_context):
        return True
    if any(
        key.lower() in KAI or key.partition("/")[0] in runtime_devices.DEVICE_ANNOTATIONS for key in pod.annotations
    ):
        return True
    for containers in (spec.containers, spec.init_containers):
        for container in containers or ():
            if _privilege_of(container.security_context) or (
                container.resources and "/" in "".join(resources_of(container))
            ):
                return True
            # Environment variables that change limits are not checked here, because they have an effect only in a
            # container with a GPU resource or a claim.
            for variable in container.env or ():
                if variable.name in runtime_devices.GIVING_VARIABLES:
                    return True
    return False


def find_bypasses(
    pod: Pod,
    request: PodRequest,
    known: GpuResources,
    runtime_classes: RuntimeClasses,
    extended: Collection[str] | None = None,
) -> Iterator[Bypass]:
    """Yield a bypass for each field of a pod that is not allowed, except for the faults that `read_request` finds.

    ``extended``: the extended resources for which the scheduler allocates devices of a DeviceClass; None if this system
    does not charge claims.
    """
    spec = pod.spec
    claims = bool(spec.resource_claims)
    if claims and extended is None:
        message = "must not be set, because ResourceClaims cannot be charged in this cluster. Request a GPU resource"
        yield Bypass("spec.resourceClaims", message)
    name = spec.runtime_class_name
    if name and not request.asks and runtime_classes.gives_gpus(name):
        message = f"runtime class {cut(name)} gives GPUs to a pod that requests none. Request a GPU resource"
        if claims:
            message = (
                f"runtime class {cut(name)} may give the pod GPUs in addition to those of its ResourceClaims. "
                "Remove runtimeClassName, which the devices of a ResourceClaim do not need"
            )
        yield Bypass("spec.runtimeClassName", message, Allowance.RUNTIME_CLASS)
    if len({scheme.scheduler for scheme in request.schemes if scheme.scheduler}) > 1:
        names = " and ".join(scheme.name for scheme in request.schemes)
        yield Bypass(
            "spec.schedulerName",
            f"no scheduler can place a pod with resources of {names}, because their schedulers differ. "
            "Request resources of only one vendor",
        )
    yield from _privileged("spec", spec.security_context)
    judge = _Judge(known, extended or (), tuple(_limits_of(request, known, claims=claims)))
    for path, container in pod.all_containers():
        yield from _of_container(path, container, judge)
    yield from _annotations(pod.annotations)
    # A ResourceClaim that the pod names may not exist yet. So it is assumed to request a share of a card.
    if request.has_share or claims:
        yield from find_unlimited(pod.annotations)


def _annotations(keys: Iterable[str]) -> Iterator[Bypass]:
    for key in keys:
        if allowance := KAI.get(key.lower()):
            message = "must not be set, because shares requested by annotation are not charged. Request a GPU resource"
            yield Bypass(f"metadata.annotations[{key}]", message, allowance)
        elif key.partition("/")[0] in runtime_devices.DEVICE_ANNOTATIONS:
            message = "must not be set, because a container runtime reads it and gives unrequested devices"
            yield Bypass(f"metadata.annotations[{key}]", message, Allowance.VISIBLE_DEVICES)


def _limits_of(request: PodRequest, known: GpuResources, *, claims: bool) -> Iterator[ShareLimits]:
    # Vendors may limit even whole cards. So variables that turn off all limits are checked for every GPU request.
    if request.asks or claims:
        yield known.variables[Allowance.DISABLE_CONTROL]
    if request.has_share or claims:
        yield known.variables[Allowance.CORE_POLICY]
    yield from dict.fromkeys([*request.limits, *(known.limits_without_scheme if claims else ())])


def find_unlimited(annotations: Mapping[str, str]) -> Iterator[Bypass]:
    """Yield a bypass for each annotation of a pod or ResourceClaim that turns off the core limit of a share.

    vgpu-manager's DRA driver reads the annotations of the claim (`getComputePolicy` in pkg/kubeletplugin/vgpu.go).
    """
    for key, value in annotations.items():
        if key.endswith(COMPUTE_POLICY) and value.strip().casefold() not in COMPUTE_POLICIES:
            message = f"must be fixed or balance, because {cut(value)!r} turns off the core limit of a share of a card"
            yield Bypass(f"metadata.annotations[{key}]", message, Allowance.COMPUTE_POLICY)


def _of_container(path: str, container: Container, judge: _Judge) -> Iterator[Bypass]:
    resources = [name for name, quantity in resources_of(container).items() if quantity not in NONE]
    yield from _unknown_resources(path, resources, judge)
    yield from _privileged(path, container.security_context)
    takes_gpus = any(map(judge.known.counts, resources)) or bool(container.resources and container.resources.claims)
    yield from _variables(path, container, resources, judge, takes_gpus=takes_gpus)
    if not takes_gpus:
        return
    for index, mount in enumerate(container.volume_mounts or ()):
        if any(limits.covers(mount.mount_path) for limits in judge.limits):
            message = "must be another path: a volume here can replace the library that limits a share of a card"
            yield Bypass(f"{path}.volumeMounts[{index}].mountPath", message, Allowance.LIMIT_LIBRARY)


def _variables(
    path: str, container: Container, resources: Collection[str], judge: _Judge, *, takes_gpus: bool
) -> Iterator[Bypass]:
    variables = container.env or ()
    exposed = False
    if any(map(runtime_devices.makes_legacy_image, variables)):
        exposed = not (runtime_devices.is_covered(resources, judge.known) or runtime_devices.hides_cards(variables))
    for index, variable in enumerate(variables):
        field = f"{path}.env[{index}]"
        if runtime_devices.gives_devices(variable):
            message = f"{variable.name} must be none or void, or must not be set, because it gives unrequested devices"
            if variable.name in runtime_devices.MIG_CONTROL:
                message = f"{variable.name} must not be set, because it gives control of MIG on unrequested cards"
            yield Bypass(field, message, Allowance.VISIBLE_DEVICES)
        elif exposed and runtime_devices.makes_legacy_image(variable):
            message = (
                "CUDA_VERSION gives a container without a GPU resource all cards of its node. "
                "Remove CUDA_VERSION, or set NVIDIA_VISIBLE_DEVICES to void in the same container"
            )
            yield Bypass(field, message, Allowance.VISIBLE_DEVICES)
        elif limit := _lifted(variable, container, judge, takes_gpus=takes_gpus):
            effect = EFFECTS[limit.allowance]
            message = f"{cut(variable.name)} must not be set, because {effect}"
            if limit.harmless:
                message = f"{cut(variable.name)} must be {limit.harmless}, or must not be set, because {effect}"
            yield Bypass(field, message, limit.allowance)


def _lifted(variable: EnvVar, container: Container, judge: _Judge, *, takes_gpus: bool) -> LimitVariable | None:
    """Return the rule for a variable that may lift a limit of a share of a card; None if the variable is harmless."""
    limit = next(filter(None, (limits.find(variable.name) for limits in judge.limits)), None)
    if limit is None or (limit.is_common and not takes_gpus):
        return None
    value = variable.known_value
    if value is None:
        return limit
    if limit.mirrors and value == str(resources_of(container).get(limit.mirrors)):
        return None
    return None if limit.is_harmless(value) else limit


def _privileged(path: str, context: SecurityContext | None) -> Iterator[Bypass]:
    if field := _privilege_of(context):
        kind = "privileged" if field == "privileged" else "HostProcess"
        message = f"must be false, because a {kind} container can use every card of its node"
        yield Bypass(f"{path}.securityContext.{field}", message, Allowance.PRIVILEGED)


def _privilege_of(context: SecurityContext | None) -> str:
    """Return the field by which containers can use every device of their node; empty if there is none."""
    if context is None:
        return ""
    if context.privileged:
        return "privileged"
    return "windowsOptions.hostProcess" if context.windows_options and context.windows_options.host_process else ""


def _unknown_resources(path: str, resources: Collection[str], judge: _Judge) -> Iterator[Bypass]:
    known = judge.known
    schemes = dict.fromkeys(known.scheme_of[name] for name in resources if name in known.scheme_of)
    without_count = [scheme for scheme in schemes if scheme.count and scheme.count not in resources]
    for name in resources:
        scheme = _uncounted(without_count, name, known) if without_count else None
        # An extended resource of a DeviceClass may have any name. It may be a GPU, so it must have a known charge.
        of_class = name in judge.extended and name not in known.scheme_of and known.unit_of(name) is None
        if scheme or of_class or known.is_unknown_gpu(name):
            yield Bypass(
                f"{path}.resources.limits[{name}]", _how_to_name(name, scheme) if scheme else _how_to_count(name)
            )


def _uncounted(schemes: Collection[Scheme], name: str, known: GpuResources) -> Scheme | None:
    """Return the vendor's scheme in which the resource ``name`` may be the number of vGPUs; None if there is none."""
    # An administrator can rename the resource for the number of vGPUs to any other name in the vendor's domain, even to
    # the name of a unit in `gpu_units`.
    if name in known.scheme_of or not (known.is_unknown_gpu(name) or name in known.own_units):
        return None
    domain = name.partition("/")[0]
    return next((scheme for scheme in schemes if scheme.count and scheme.count.startswith(f"{domain}/")), None)


def _how_to_name(resource: str, scheme: Scheme) -> str:
    return (
        f"this resource may be the number of vGPUs of {scheme.name}, under another name. Ask your administrator to "
        f"add this line to `gpu_schemes` in the quota ConfigMap: `{scheme.name}: {{resources: {{count: {resource}}}}}`"
    )


def _how_to_count(resource: str) -> str:
    name = unit_name(resource)
    if name in NOT_FIXED:
        return NOT_FIXED[name]
    if name.startswith(PROFILE):
        return unknown_profile(name.removeprefix(PROFILE))
    return (
        "unknown GPU resource: no value is configured for it. Ask your administrator to add a line to `gpu_units` in "
        f"the quota ConfigMap: `{name}: {{cards: 1}}` with the number of cards of one unit, or `{name}: {{}}` if "
        "the resource is not a GPU"
    )
