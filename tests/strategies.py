"""Hypothesis strategies for pods, quotas and nodes. They use few names and values, so that pods often match nodes.

Pods are manifests, in which optional fields may be missing, null or empty. Every pod has a well-formed vcuda request.
The API server accepts the objects of every strategy whose name begins with ``storable``.
"""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from tests.builders import MODEL, POOL, Manifest, container, nodes
from vcuda.placement.affinity import NAME_FIELD
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Limit, Mode, NamespaceQuota
from vcuda.requests.schemes import SCHEMES

Labels = Mapping[str, str]

MODELS = ("M40", "P100", "A100", "7")
"""One model is a number, so that Gt and Lt can select it."""
POOLS = ("public", "lab", "3")
NODE_NAMES = ("node-a", "node-b", "node-c", "node-d")
UNKNOWN_NODE = "node-z"

NUMBERS = ("0", "1", "3", "03", "5", "7", "10", "0000000000000000000000005", str(2**63 - 1), str(2**63))
VALUES_OF: Mapping[str, tuple[str, ...]] = {
    MODEL: MODELS,
    POOL: POOLS,
    "zone": ("a", "b", ""),
    "example.com/rank": NUMBERS,
}
"""The label keys of nodes, each with the values that nodes may have."""

KEYS = st.sampled_from(sorted(VALUES_OF))


def label_sets() -> st.SearchStrategy[dict[str, str]]:
    values = {key: st.sampled_from(values) for key, values in VALUES_OF.items()}
    return st.fixed_dictionaries({}, optional=values)


def clusters() -> st.SearchStrategy[Nodes]:
    return st.dictionaries(st.sampled_from(NODE_NAMES), label_sets()).map(lambda labels: nodes(**labels))


def _with_values(key: str, values: st.SearchStrategy[list[str]], *operators: str) -> st.SearchStrategy[Manifest]:
    return st.fixed_dictionaries({"key": st.just(key), "operator": st.sampled_from(operators), "values": values})


def _requirements_on(key: str) -> st.SearchStrategy[Manifest]:
    listed = st.lists(st.sampled_from((*VALUES_OF[key], "other-0", "6")), min_size=1, max_size=4, unique=True)
    bounds = st.sampled_from((*NUMBERS, "-1", "6")).map(lambda bound: [bound])
    presence: st.SearchStrategy[Manifest] = st.fixed_dictionaries(
        {"key": st.just(key), "operator": st.sampled_from(["Exists", "DoesNotExist"])},
        optional={"values": st.sampled_from([None, []])},
    )
    return _mostly(_with_values(key, listed, "In", "NotIn"), presence | _with_values(key, bounds, "Gt", "Lt"))


def requirements() -> st.SearchStrategy[Manifest]:
    """A requirement of matchExpressions that the API server accepts."""
    return KEYS.flatmap(_requirements_on)


def odd_requirements() -> st.SearchStrategy[Manifest]:
    """A requirement that the API server rejects: an unknown operator, or values that do not suit the operator."""
    listed = [(operator, ["a"]) for operator in ("in", "", "Exists", "DoesNotExist")]
    bounds = [("Gt", ["1", "3"]), ("Lt", ["high"]), ("Lt", ["1_0"])]
    odd = st.sampled_from([*listed, *bounds, ("In", []), ("NotIn", None), ("Gt", [])])
    return st.builds(lambda key, row: {"key": key, "operator": row[0], "values": row[1]}, KEYS, odd)


def field_requirements() -> st.SearchStrategy[Manifest]:
    """A requirement of matchFields: the node's metadata.name is In, or NotIn, a list with one name."""
    name = st.sampled_from((*NODE_NAMES, UNKNOWN_NODE)).map(lambda name: [name])
    return _with_values(NAME_FIELD, name, "In", "NotIn")


def terms() -> st.SearchStrategy[Manifest]:
    """A nodeSelectorTerm. Its matchExpressions and its matchFields may each be missing, null or empty."""
    missing: st.SearchStrategy[list[Manifest] | None] = st.sampled_from([None, []])
    return st.fixed_dictionaries(
        {},
        optional={
            "matchExpressions": _mostly(st.lists(requirements(), min_size=1, max_size=3), missing),
            "matchFields": _mostly(missing, st.lists(field_requirements(), min_size=1, max_size=2)),
        },
    )


PREFERRED = {"preference": {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}, "weight": 5}
ANTI_AFFINITY = {
    "requiredDuringSchedulingIgnoredDuringExecution": [
        {"labelSelector": {"matchLabels": {"app": "train"}}, "topologyKey": "kubernetes.io/hostname"}
    ]
}


def storable_affinities() -> st.SearchStrategy[Manifest | None]:
    """A spec.affinity in which any field may be null or missing. nodeSelectorTerms, if present, has one to three."""
    return _affinities(st.lists(terms(), min_size=1, max_size=3))


def affinities() -> st.SearchStrategy[Manifest | None]:
    """An affinity that the API server accepts, or one whose nodeSelectorTerms are null or empty."""
    none: st.SearchStrategy[list[Manifest] | None] = st.sampled_from([None, []])
    return _affinities(_mostly(st.lists(terms(), min_size=1, max_size=3), none))


def _affinities(listed: st.SearchStrategy[list[Manifest] | None]) -> st.SearchStrategy[Manifest | None]:
    """A spec.affinity. Its nodeSelectorTerms are drawn from ``listed``, and are sometimes left out."""
    preferred: st.SearchStrategy[list[Manifest] | None] = st.sampled_from([None, [], [PREFERRED]])
    beside = {"preferredDuringSchedulingIgnoredDuringExecution": preferred}
    pods = {"podAntiAffinity": st.just(ANTI_AFFINITY)}
    required = st.fixed_dictionaries({"nodeSelectorTerms": listed})
    held = st.fixed_dictionaries({"requiredDuringSchedulingIgnoredDuringExecution": required}, optional=beside)
    null_required = {"requiredDuringSchedulingIgnoredDuringExecution": st.none()}
    not_held = st.none() | st.fixed_dictionaries({}, optional={**null_required, **beside})
    missing = st.none() | st.fixed_dictionaries({}, optional={"nodeAffinity": not_held, **pods})
    return _mostly(st.fixed_dictionaries({"nodeAffinity": held}, optional=pods), missing)


def _mostly(often: st.SearchStrategy[Any], seldom: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw from ``often`` three times in four. With an even choice, deeply nested fields would rarely be drawn."""
    return st.sampled_from([often, often, often, seldom]).flatmap(lambda chosen: chosen)


def requests() -> st.SearchStrategy[Manifest]:
    """Well-formed limits of a container, in one of the four sets of GPU resource names that vcuda supports."""
    share, cards, memory = st.integers(1, 99), st.integers(1, 3), st.integers(1, 64)
    by_scheme = []
    for domain in ("tencent.com", "nvidia.com"):
        core, size = f"{domain}/vcuda-core", f"{domain}/vcuda-memory"
        by_scheme.append(st.fixed_dictionaries({core: share, size: memory}))
        by_scheme.append(st.fixed_dictionaries({core: cards.map(lambda n: n * 100)}, optional={size: memory}))
    for count, core, size in (("gpu", "gpucores", "gpumem"), ("vgpu-number", "vgpu-cores", "vgpu-memory")):
        one = {f"nvidia.com/{count}": cards}
        by_scheme.append(st.fixed_dictionaries(one))
        by_scheme.append(
            st.fixed_dictionaries({**one, f"nvidia.com/{core}": share | st.just(100), f"nvidia.com/{size}": memory})
        )
    return st.one_of(by_scheme).map(lambda limits: {name: str(amount) for name, amount in limits.items()})


ALLOCATIONS = (
    *(f"{name}0" if name.endswith("-") else name for scheme in SCHEMES for name in scheme.allocation_annotations),
    "tencent.com/predicate-gpu-idx-12",
)
"""Annotations in which vendors record allocated cards. A new pod has them if its manifest was copied or forged."""

NEAR_ALLOCATIONS = ("tencent.com/predicate-times", "example.com/predicate-time", "hami.io/vgpu")
"""Keys that resemble allocation keys, but belong to the user."""

TYPES = (name for scheme in SCHEMES for name in (scheme.wanted_models, scheme.unwanted_models) if name)
TYPE_ANNOTATIONS = tuple(dict.fromkeys(TYPES))


def storable_annotations() -> st.SearchStrategy[dict[str, str] | None]:
    """Annotations of a pod, or null: the user's, the webhook's, those that select models, and allocation records."""
    own = st.sampled_from(["note", "example.com/a_b", "quota.vcuda.io/model", *NEAR_ALLOCATIONS])
    models = st.lists(st.sampled_from(("", " ", *MODELS, "m4", " p100 ", "00")), max_size=3).map(",".join)
    return _merged(
        st.dictionaries(own, st.sampled_from(["", "yes", "M40"]), max_size=3),
        st.dictionaries(st.sampled_from(TYPE_ANNOTATIONS), models, max_size=2),
        st.dictionaries(st.sampled_from(ALLOCATIONS), st.sampled_from(["1", "node-a", "true"]), max_size=3),
    )


def pod_annotations() -> st.SearchStrategy[dict[str, str] | None]:
    """Annotations that the API server accepts, and keys that must be escaped in a JSON Pointer."""
    awkward = st.sampled_from(["~", "a~1b", "a~0/b", "/", "x/y/z", "tencent.com/predicate-gpu-idx-~/0"])
    return _merged(storable_annotations().map(lambda found: found or {}), st.dictionaries(awkward, st.just("v")))


def _merged(*parts: st.SearchStrategy[dict[str, str]]) -> st.SearchStrategy[dict[str, str] | None]:
    together = st.tuples(*parts).map(lambda found: {key: value for part in found for key, value in part.items()})
    return st.none() | together


def pod_labels() -> st.SearchStrategy[dict[str, str] | None]:
    """Labels of a pod, or null. vgpu-manager records a part of its allocations in labels."""
    keys = st.sampled_from(["app", "nvidia.com/assigned-phase", "nvidia.com/assigned"])
    return st.none() | st.dictionaries(keys, st.just("succeed"))


def node_selectors() -> st.SearchStrategy[dict[str, str] | None]:
    """A spec.nodeSelector, or null. It is usually empty."""
    chosen = KEYS.flatmap(lambda key: st.tuples(st.just(key), st.sampled_from(VALUES_OF[key])))
    return _mostly(st.sampled_from([None, {}]), st.lists(chosen, min_size=1, max_size=2).map(dict))


@st.composite
def _pods(
    draw: st.DrawFn, noted: st.SearchStrategy[dict[str, str] | None], placed: st.SearchStrategy[Manifest | None]
) -> Manifest:
    """A pod that requests vcuda in one or two containers. Any optional part may be left out."""
    metadata = st.fixed_dictionaries(
        {"name": st.just("train-0")}, optional={"annotations": noted, "labels": pod_labels()}
    )
    asked = draw(st.lists(requests(), min_size=1, max_size=2))
    optional: dict[str, st.SearchStrategy[Any]] = {
        "nodeSelector": node_selectors(),
        "nodeName": _mostly(st.just(""), st.sampled_from((*NODE_NAMES, UNKNOWN_NODE))),
        "schedulerName": st.sampled_from(["default-scheduler", "volcano", "gpu-admission", ""]),
        "priority": st.just(0),
    }
    named = [container(limits, name=f"c{index}") for index, limits in enumerate(asked)]
    spec = draw(st.fixed_dictionaries({"containers": st.just(named)}, optional=optional))
    where = draw(_mostly(st.fixed_dictionaries({"affinity": placed}), st.just({})))
    return {"apiVersion": "v1", "kind": "Pod", "metadata": draw(metadata), "spec": {**spec, **where}}


def pods() -> st.SearchStrategy[Manifest]:
    """A pod in every form that a client could send."""
    return _pods(pod_annotations(), affinities())


def storable_pods() -> st.SearchStrategy[Manifest]:
    return _pods(storable_annotations(), storable_affinities())


def quotas() -> st.SearchStrategy[NamespaceQuota]:
    """A quota in mode enforce, with two or more models in any order, and at most two node pools. A limit may be 0."""
    limits = st.builds(Limit, st.sampled_from([1200, 600, 50, 0]), st.sampled_from([None, 4096, 1024**2]))
    pools = st.lists(st.sampled_from(POOLS), unique=True, max_size=2).map(tuple)
    listed = st.dictionaries(st.sampled_from(MODELS), limits, min_size=2)
    return st.builds(NamespaceQuota, listed, pools, st.just(Mode.ENFORCE))
