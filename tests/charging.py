"""Computes the charge of a pod from its manifest, as the documentation of Kubernetes and of the vendors defines it.

Tests compare the charges of the webhook with these results. So this module shares no code with the webhook. Sources:
the READMEs of tkestack/gpu-manager, Project-HAMi/HAMi and coldzerofear/vgpu-manager, and
https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers/#resource-sharing-within-containers
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

Amounts = tuple[int, int, int]
"""A charge: cores (a card has 100), MiB of memory, and the memory that is known only in hundredths of a card's."""

NOTHING: Amounts = (0, 0, 0)
WHOLE: Amounts = (100, 0, 100)
"""The charge of a whole card."""
SUFFIXES: Mapping[str, int | Fraction] = {
    "m": Fraction(1, 1000),
    "k": 1000,
    "M": 1000**2,
    "Ki": 1024,
    "Mi": 1024**2,
    "": 1,
}

OWN = {"tencent.com": 256, "nvidia.com": 1}
"""The domains of the resources vcuda-core and vcuda-memory, each with the MiB in one unit of its vcuda-memory."""
COUNTED = {"gpu": ("gpucores", "gpumem", "gpumem-percentage"), "vgpu-number": ("vgpu-cores", "vgpu-memory", "")}
"""For each resource that counts vGPUs: the resources for cores, memory and memory percentage of one vGPU."""
UNITS: Mapping[str, Amounts] = {
    "nvidia.com/mig-3g.20gb": (50, 20480, 0),
    "nvidia.com/mig-7g.80gb": (100, 81920, 0),
    "deviceclass.resource.kubernetes.io/gpu.nvidia.com": (100, 0, 100),
    "nvidia.com/hostdev": NOTHING,
}
"""The charge for one unit of each resource. NVIDIA's MIG guide: parts of a card's slices, and the memory."""
VENDOR_RESOURCES = (
    *(f"{domain}/{name}" for domain in OWN for name in ("vcuda-core", "vcuda-memory")),
    *(f"nvidia.com/{name}" for count, shares in COUNTED.items() for name in (count, *shares) if name),
)
"""The vendors' resources that this module charges, in addition to `UNITS`."""
UNKNOWN = ("amd.com/gpu", "nvidia.com/gpu.shared", "deviceclass.resource.kubernetes.io/other.example.com")
"""Resources that may be GPUs, but whose charge is not configured. The webhook must reject pods with them."""


def asked_by(pod: Mapping[str, Any], device: int = 100, *, has_mig: bool = True) -> Amounts:
    """Return the charge of a pod on a GPU model.

    ``device``: the charge for one ``nvidia.com/gpu``, in hundredths of a card.
    ``has_mig``: False if cards of the model have no MIG. A MIG device is then charged as a whole card.
    """
    units = UNITS if has_mig else {name: WHOLE if "/mig-" in name else value for name, value in UNITS.items()}
    return plus(*(_effective(pod["spec"], way, device, units) for way in (*OWN, *COUNTED, *units)))


def _containers(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]


def _amounts(container: Mapping[str, Any]) -> Mapping[str, Any]:
    resources = container.get("resources") or {}
    return {**(resources.get("requests") or {}), **(resources.get("limits") or {})}


def _effective(spec: Mapping[str, Any], way: str, device: int, units: Mapping[str, Amounts]) -> Amounts:
    together = plus(*(_container(each, way, device, units) for each in spec.get("containers") or []))
    beside, largest = NOTHING, NOTHING
    for each in spec.get("initContainers") or []:
        takes = plus(beside, _container(each, way, device, units))
        if each.get("restartPolicy") == "Always":
            beside = takes
        largest = most(largest, takes)
    return most(plus(together, beside), largest)


def _container(container: Mapping[str, Any], way: str, device: int, units: Mapping[str, Amounts]) -> Amounts:
    amounts = _amounts(container)

    def ask(name: str) -> int:
        return whole(amounts.get(name if "/" in name else f"nvidia.com/{name}", 0))

    if way in units:
        value = units[way]
        count = ask(way) if value != NOTHING else 0
        return count * value[0], count * value[1], count * value[2]
    if way in OWN:
        cores, memory = ask(f"{way}/vcuda-core"), ask(f"{way}/vcuda-memory") * OWN[way]
        return (cores, 0, cores) if cores >= 100 else (cores, memory, 0)
    if way == "gpu" and not any(f"nvidia.com/{name}" in amounts for name in COUNTED[way]):
        return ask(way) * device, 0, ask(way) * device
    share, size, percentage = (ask(name) for name in COUNTED[way])
    if not (ask(way) or share or size or percentage):
        return NOTHING
    count, cores = ask(way) or 1, share or 100
    if share == 100 or not (size or percentage):
        return count * cores, 0, count * 100
    return (count * cores, count * size, 0) if size else (count * cores, 0, count * percentage)


def gives_more(pod: Mapping[str, Any]) -> bool:
    """Return True if a pod may use more of a GPU than `asked_by` charges. The webhook must reject such a pod."""
    spec = pod["spec"]
    if spec.get("resourceClaims") or (spec.get("runtimeClassName") == "nvidia" and asked_by(pod) == NOTHING):
        return True
    for each in _containers(spec):
        amounts = _amounts(each)
        if any(str(amounts.get(name) or 0) != "0" for name in UNKNOWN):
            return True
        if (each.get("securityContext") or {}).get("privileged"):
            return True
        variables = [(line["name"], line.get("value")) for line in each.get("env") or []]
        if any(name == "NVIDIA_VISIBLE_DEVICES" and value not in ("none", "void") for name, value in variables):
            return True
    return False


def whole(quantity: str | float) -> int:
    """Return a quantity as an integer. Raises AssertionError if it is no whole number, or negative."""
    text = str(quantity)
    suffix = text.lstrip("+-.0123456789e")
    number = Fraction(text.removesuffix(suffix)) * SUFFIXES[suffix]
    assert number >= 0
    assert number.denominator == 1
    return int(number)


def plus(*amounts: Amounts) -> Amounts:
    cores, memory, card_memory = (sum(part) for part in zip(NOTHING, *amounts, strict=True))
    return cores, memory, card_memory


def most(one: Amounts, other: Amounts) -> Amounts:
    return max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2])
