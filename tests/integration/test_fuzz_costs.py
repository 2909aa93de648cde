"""Searches for reviews of at most 64 KiB that cost the event loop the most function calls."""

import itertools
import string
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st, target

from examples.claims import CLASSES, NVIDIA, claim, entry, first_of
from tests.builders import LABELS, Manifest, container, held_to, pod, required, requirement, term
from tests.costs import MODELS, CountedWebhook, policy, review_of
from tests.integration.fuzzing import for_a_while
from vcuda.claims.digest import MAX_CLAIM_ENTRIES
from vcuda.claims.pin import ClaimPin, write_pin
from webhook.admission import LARGE_REVIEW, MAX_REVIEW_STEPS

pytestmark = pytest.mark.slow

EXAMPLES = 40
SHARE = 0.3
CALLS_OF_A_MODEL = 50
"""Function calls for each GPU model of the namespace's quota, in addition to those of `MAX_REVIEW_STEPS`."""
CALLS_OF_A_STEP = 12
ROOM = LARGE_REVIEW - 1024
"""The bytes of a pod, so that its review is not larger than `LARGE_REVIEW`."""

IGNORED = {"hami.io/webhook": "ignore"}
CARD = {"tencent.com/vcuda-core": 100}
WEBHOOK = CountedWebhook(policy())

Item = Callable[[int], Any]
"""A function that returns the nth item of a list in a pod."""


def most_calls(body: bytes) -> int:
    """Return the bound on function calls for a review: linear in its size and in the number of GPU models."""
    return len(body) + CALLS_OF_A_MODEL * MODELS + CALLS_OF_A_STEP * MAX_REVIEW_STEPS


RESOURCES: tuple[Item, ...] = (
    lambda _n: CARD,
    lambda n: {"nvidia.com/gpu": n + 1},
    lambda n: {"nvidia.com/gpu": 1, "nvidia.com/gpumem": n + 1},
    lambda n: {"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-cores": n % 100},
    lambda n: {f"nvidia.com/mig-{n % 7 + 1}g.{n + 1}gb": 1},
    lambda n: {f"nvidia.com/a{n}": 1},
    lambda n: {"cpu": n},
)
VALUES: tuple[Item, ...] = (
    lambda n: f"v{n}",
    lambda n: f"NVIDIA-M{n % MODELS}-{n}GB",
    lambda n: f"{n}-M{MODELS - 1}-PCIE",
    lambda n: f"M{n % MODELS}",
    lambda _n: "x" * 64,
)
ENV = ("E", "CUDA_DEVICE_SM_LIMIT_", "NVIDIA_VISIBLE_DEVICES", "CUDA_VERSION", "LD_LIBRARY_PATH")
KEYS: tuple[Item, ...] = (lambda _n: LABELS.model, lambda _n: LABELS.pool, lambda n: f"k{n}")
TYPES = ("nvidia.com/use-gputype", "nvidia.com/nouse-gputype", "nvidia.com/include-gpu-type", "quota.vcuda.io/models")
LISTS: tuple[Item, ...] = (lambda n: f"x{n}", lambda n: f"M{n}", lambda _n: "", lambda _n: "x")
PARTS = ("terms", "values", "containers", "units", "env", "mounts", "selector", "types", "records", "claims", "node")
RECORDS = ("tencent.com/predicate-gpu-idx-", "example.com/a", "gpu-fraction", "x.io/vgpu-compute-policy")


class Sent(dict[str, Any]):
    """A manifest of which `repr` shows only the beginning."""

    def __repr__(self) -> str:
        return f"{dict(self)!r:.2000}"


def filled(item: Item, size: int) -> list[Any]:
    """Return as many items as fit into ``size`` bytes of JSON."""
    sizes = itertools.accumulate(len(msgspec.json.encode(item(n))) + 1 for n in range(size))
    return [item(n) for n, so_far in enumerate(itertools.takewhile(lambda each: each <= size, sizes))]


def merged(item: Callable[[int], dict[str, Any]], size: int) -> dict[str, Any]:
    return {key: value for each in filled(item, size) for key, value in each.items()}


@st.composite
def items(draw: st.DrawFn, room: int) -> Mapping[str, Any]:
    """Return parts of a pod that have about ``room`` bytes together. Each part repeats one form of an item."""
    of = draw(
        st.dictionaries(
            st.sampled_from(PARTS),
            st.integers(1, 8),
            min_size=1,
            max_size=4,
        )
    )
    size = {part: room * weight // sum(of.values()) for part, weight in of.items()}
    resources, value, key = draw(st.sampled_from(RESOURCES)), draw(st.sampled_from(VALUES)), draw(st.sampled_from(KEYS))
    operator = draw(st.sampled_from(["In", "NotIn", "Gt", "Lt", "Exists"]))
    variable, listed, record = draw(st.sampled_from(ENV)), draw(st.sampled_from(LISTS)), draw(st.sampled_from(RECORDS))
    many = draw(st.sampled_from([1, 4, MODELS]))
    expression: Mapping[str, Callable[[int], list[str]]] = {
        "Gt": lambda n: [str(n)],
        "Lt": lambda n: [str(n)],
        "Exists": lambda _n: [],
    }
    several: Callable[[int], list[str]] = lambda n: [value(n * many + at) for at in range(many)]  # noqa: E731
    values = expression.get(operator, several)
    spec: dict[str, Any] = {}
    terms = filled(lambda n: term(requirement(key(n), operator, *values(n))), size.get("terms", 0))
    if "values" in size:
        terms.append(term(requirement(LABELS.model, "In", *filled(value, size["values"]))))
    if terms:
        spec["affinity"] = required(*terms)
    elif draw(st.booleans()):
        spec["affinity"] = held_to("M5")
    if "node" in size:
        spec["nodeName"] = "n" * size["node"]
    first = container(
        merged(resources, size.get("units", 0)) or resources(0),
        env=filled(
            lambda n: {"name": f"{variable}{n}" if variable[-1] in "E_" else variable, "value": "x"}, size.get("env", 0)
        ),
        volumeMounts=filled(lambda n: {"name": "a", "mountPath": f"/{n}"}, size.get("mounts", 0)),
    )
    spec["containers"] = [first, *filled(lambda n: container(resources(n), name=f"c{n}"), size.get("containers", 0))]
    spec["nodeSelector"] = merged(lambda n: {f"k{n}": "v"}, size.get("selector", 0))
    spec["resourceClaims"] = filled(
        lambda n: {"name": f"r{n}", "resourceClaimTemplateName": f"t{n}"}, size.get("claims", 0)
    )
    annotations = merged(lambda n: {f"{record}{n}": "x"}, size.get("records", 0))
    for name in draw(st.sets(st.sampled_from(TYPES), min_size=1)) if "types" in size else ():
        annotations[name] = ",".join(filled(listed, min(size["types"] // 4, 8192)))[: 2048 if "quota" in name else 8192]
    labels = IGNORED if draw(st.booleans()) else {}
    return {"spec": spec, "annotations": annotations, "labels": labels}


@st.composite
def pods(draw: st.DrawFn) -> Manifest:
    parts = draw(items(ROOM))
    metadata = {"name": "p", "namespace": "team-a", "uid": "u"}
    metadata |= {"annotations": parts["annotations"], "labels": parts["labels"]}
    return {**pod(), "metadata": metadata, "spec": parts["spec"]}


PROFILE = f'device.attributes["{NVIDIA}"].profile'
PRODUCT = f'device.attributes["{NVIDIA}"].productName'
ENTRIES: tuple[Item, ...] = (
    lambda _n: {},
    lambda n: {"count": n % 32 + 1},
    lambda n: {"selectors": [{"cel": {"expression": f'{PROFILE} == "{n % 7 + 1}g.{n + 1}gb"'}}]},
    lambda n: {"selectors": [{"cel": {"expression": f'{PRODUCT} == "NVIDIA M{n} 80GB"'}}]},
    lambda n: {
        "selectors": [{"cel": {"expression": write_pin(ClaimPin(NVIDIA, ("m5", f"m5-{n}"), (f"1g.{n + 1}gb",)))}}]
    },
    lambda n: {"capacity": {"requests": {"cores": str(n + 1), "memory": f"{n + 1}Gi"}}},
)


@st.composite
def claims(draw: st.DrawFn) -> Manifest:
    """ResourceClaims of up to 64 entries, which are equal, or differ by one or two rules."""
    name, forms = (
        draw(st.sampled_from(sorted(CLASSES))),
        draw(st.lists(st.sampled_from(ENTRIES), min_size=1, max_size=2)),
    )
    alternatives = draw(st.integers(1, 8))
    requests = draw(st.integers(1, min(32, MAX_CLAIM_ENTRIES // alternatives)))
    numbers = itertools.count()

    def made() -> Manifest:
        n = next(numbers)
        return entry(name, **{field: value for form in forms for field, value in form(n).items()})

    listed = [first_of(*(made() for _ in range(alternatives))) if alternatives > 1 else made() for _ in range(requests)]
    return claim(*listed, uid="u")


def asking(containers: list[Manifest], **spec: Any) -> Manifest:
    return {**pod(), "metadata": {"name": "p", "uid": "u"}, "spec": {"containers": containers, **spec}}


PARTITIONS = claim(*[first_of(*[entry("mig.nvidia.com")] * 8)] * 8, uid="u")
"""A claim of 3.8 KiB for which the charge of every MIG profile was computed for each entry and GPU model."""
PRODUCTS = term(requirement(LABELS.model, "In", *filled(lambda n: f"NVIDIA-M99-{n}GB", ROOM - 1024)))
LISTING = asking([container(CARD)], affinity=required(PRODUCTS))
"""A pod of 60 KiB whose node affinity lists thousands of products, each of which was compared with all `gpu_models`."""
BOUNDS = filled(lambda n: term(requirement(LABELS.model, "Gt", str(n))), ROOM - 1024)
BOUNDED = asking([container(CARD)], affinity=required(*BOUNDS))
"""A pod whose node affinity has hundreds of terms, each of which was compared with the labels of all GPU models."""
PARTED = asking(filled(lambda n: container({f"nvidia.com/mig-{n % 7 + 1}g.{n + 1}gb": 1}), ROOM - 1024))
"""A pod of hundreds of containers with different resources, each of which was looked up in all containers."""
ALIKE = asking(filled(lambda _n: container({"nvidia.com/gpu": 1}), ROOM - 1024))
"""A pod of hundreds of containers with a card each, whose charge takes steps of containers times GPU models."""
SUFFIXES = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]
PROFILED = asking([container(merged(lambda n: {f"nvidia.com/mig-1g.5gb.{SUFFIXES[n]}": 1}, ROOM - 1024))])
"""A pod with thousands of names of MIG profiles, each of which has a charge on each GPU model."""
SLICED = asking([container(merged(lambda n: {f"nvidia.com/mig-{n % 9 + 1}g.{n // 9 + 1}gb": 1}, 50_000))])
"""A pod with thousands of MIG profiles, each of which was compared with all `gpu_models` that state slices."""
TERMS = filled(lambda _n: term(requirement("a", "Exists")), ROOM - 1024)
NARROWED = asking([container({"nvidia.com/gpu": 1})], affinity=required(*TERMS))
NARROWED["metadata"]["labels"] = IGNORED
"""A pod whose node affinity has a thousand terms, each of which got the names of all nodes of HAMi."""
HALF = filled(lambda _n: term(requirement("a", "Exists")), ROOM // 2)
NAMED = asking([container(CARD)], affinity=required(*HALF), nodeName="n" * (ROOM // 2 - 1024))
"""A pod with hundreds of terms, each of which got a node name of 30 KiB."""


@pytest.mark.timeout(900)
def test_no_small_review_needs_many_calls_on_the_event_loop() -> None:
    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck), deadline=None)
    @given((pods() | claims()).map(Sent), st.sampled_from(["/mutate", "/validate"]), st.booleans())
    @example(Sent(PARTITIONS), "/mutate", False)
    @example(Sent(PARTITIONS), "/mutate", True)
    @example(Sent(LISTING), "/mutate", False)
    @example(Sent(LISTING), "/validate", False)
    @example(Sent(BOUNDED), "/mutate", False)
    @example(Sent(PARTED), "/validate", False)
    @example(Sent(ALIKE), "/mutate", False)
    @example(Sent(ALIKE), "/validate", False)
    @example(Sent(PROFILED), "/mutate", False)
    @example(Sent(PROFILED), "/validate", False)
    @example(Sent(SLICED), "/mutate", False)
    @example(Sent(SLICED), "/validate", False)
    @example(Sent(NARROWED), "/mutate", False)
    @example(Sent(NAMED), "/mutate", False)
    def review(manifest: Manifest, path: str, dry_run: bool) -> None:
        body = review_of(manifest, dryRun=dry_run)
        assert len(body) <= LARGE_REVIEW
        cost = WEBHOOK.cost(path, body)
        target(float(cost.calls))
        most["calls"] = max(most["calls"], cost.calls)
        assert cost.calls <= most_calls(body), cost.functions.most_common(5)

    most = {"calls": 0}
    times = for_a_while(SHARE, review)
    print(f"most function calls for a review, in {times} rounds: {most['calls']}")
