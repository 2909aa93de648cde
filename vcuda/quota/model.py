"""The quota of each GPU model in a namespace, the charges of objects, and the decision whether a charge fits.

Decisions are made from these values. ``vcuda.quota.document`` reads a quota from the document that people write.
"""

import enum
import functools
import math
from collections.abc import Callable, Iterable, Mapping

import msgspec

from vcuda.quota.terms import CORES_PER_CARD, LEDGER_NAMESPACE, NODE_NAMESPACE, OVER_QUOTA, Mode, cards, mebibytes
from vcuda.quota.times import Times

__all__ = [
    "CORES_PER_CARD",
    "DEFAULT",
    "LEDGER_NAMESPACE",
    "NODE_NAMESPACE",
    "NOT_MUTATED",
    "OVER_QUOTA",
    "SYSTEM_NAMESPACES",
    "UNASKED_NAMESPACES",
    "Allowance",
    "Charge",
    "Grant",
    "Granted",
    "Limit",
    "Mode",
    "NamespaceQuota",
    "Quota",
    "Shortage",
    "Usage",
    "cards",
    "exceeded",
    "fits",
    "free_of",
    "mebibytes",
    "total",
]

NOT_MUTATED = "/mutate was not called, or another webhook ran after it"

# If a pod of these namespaces was refused, the cluster could fail to start. So the `*` entry never applies to them.
SYSTEM_NAMESPACES = frozenset({"kube-system", "kube-public", "kube-node-lease"})

# If the webhook had to admit its own pods, it could never start again after all of these pods were deleted.
UNASKED_NAMESPACES = frozenset({"kube-system", "vcuda-quota", LEDGER_NAMESPACE, NODE_NAMESPACE})
"""The namespaces for whose pods the API server does not call the webhook, by the names in manifests/base."""


DEFAULT = "*"
"""The key of the entry for namespaces without their own entry."""


class Allowance(enum.StrEnum):
    """Settings of a pod that give it more of a GPU than it is charged. The quota entry must allow each of them."""

    PRIVILEGED = "privileged"
    """A privileged container, which sees every device of its node."""
    VISIBLE_DEVICES = "visible-devices"
    """Variables by which a container runtime gives a container devices."""
    RUNTIME_CLASS = "runtime-class"
    """A runtime class for GPUs in a pod that requests no GPU."""
    DISABLE_CONTROL = "cuda-disable-control"
    """Variables that turn off all limits of a share."""
    CORE_POLICY = "core-utilization-policy"
    """HAMi's variable that turns off the core limit of a share."""
    COMPUTE_POLICY = "vgpu-compute-policy"
    """vgpu-manager's annotation that turns off the core limit of a share."""
    MEMORY_LIMIT = "memory-limit-variables"
    """Variables that set the memory limit of a share, or how strictly it is enforced."""
    CORE_LIMIT = "core-limit-variables"
    """Variables that set the core limit of a share, or how strictly it is enforced."""
    LIMIT_LIBRARY = "limit-library"
    """Variables and mounts that replace the library that limits a share, or the files that it reads."""
    GPU_FRACTION = "gpu-fraction"
    """KAI's annotation for a share of a card."""
    GPU_MEMORY = "gpu-memory"
    """KAI's annotation for an amount of a card's memory."""


class Limit(msgspec.Struct, frozen=True):
    """The limit of one model in one namespace.

    ``cores`` are hundredths of a card, so 8 cards are 800. A limit of 0 blocks the model. ``memory`` is in MiB. A part
    that is None is not limited.
    """

    cores: int | None
    memory: int | None = None
    card_memory: int = 0
    """The memory of one card in MiB, if only memory is limited; 0 otherwise."""

    def __add__(self, other: "Limit") -> "Limit":
        cores = None if self.cores is None or other.cores is None else self.cores + other.cores
        memory = None if self.memory is None or other.memory is None else self.memory + other.memory
        return Limit(cores, memory, self.card_memory)

    @property
    def blocks(self) -> bool:
        return self.cores == 0

    @property
    def most_cores(self) -> int:
        """The hundredths of a card that whole cards may take under this limit."""
        return self.cores_in(self.memory or 0) if self.cores is None else self.cores

    def free_cores(self, used: "Charge") -> int:
        """Return the hundredths of a card that are free for whole cards; negative if more than the limit is used."""
        if self.cores is None:
            return self.cores_in((self.memory or 0) - used.memory_under(self))
        return self.cores - used.cores

    def cores_in(self, memory: int) -> int:
        """Return the hundredths of a card that have this memory. The limit must be on memory alone."""
        return memory * CORES_PER_CARD // self.card_memory

    def __str__(self) -> str:
        amounts = (cards, self.cores), (mebibytes, self.memory)
        return ", ".join(render(each) for render, each in amounts if each is not None)


class Grant(msgspec.Struct, frozen=True):
    """An addition to the limits of a namespace at certain times."""

    limits: Mapping[str, Limit]
    """The added limits by model. A model that the namespace's own limits set to 0 stays at 0."""
    times: Times
    why: str = ""


class Granted(msgspec.Struct, frozen=True):
    """The part of a limit that a grant adds at present."""

    model: str
    limit: Limit
    until: float
    """The time when this part ends, in Unix seconds; infinite if it does not end."""
    grant: Grant


class NamespaceQuota(msgspec.Struct, frozen=True):
    """The quota entry of one namespace. It has the limits as they are written or, after `at`, the limits of one moment.

    ``limits`` maps a model to its limit, in the order of the document. Other models must not be used. ``pools`` are the
    pools in which pods may run; empty for every pool. ``allow`` has the settings that are admitted although they give a
    pod more than it is charged.
    """

    limits: Mapping[str, Limit]
    pools: tuple[str, ...] = ()
    mode: Mode = Mode.ENFORCE
    allow: frozenset[Allowance] = frozenset()
    order: tuple[str, ...] = ()
    """The models in the order in which they are tried; empty for the order of ``limits``."""
    prefer_most_free: bool = False
    """True if the model with the most free cards and quota comes first."""
    one_model: bool = False
    """True if an object that could get several models is rejected."""
    grants: tuple[Grant, ...] = ()
    """All grants, including those that do not hold now."""
    own: Mapping[str, Limit] | None = None
    """The limits without grants, if ``limits`` are those of a moment; otherwise None."""
    granted: tuple[Granted, ...] = ()
    """The parts of ``limits`` that come from grants, in the order of the grants."""

    def at(self, moment: float | None) -> "NamespaceQuota":
        """Return the quota with the limits of ``moment``, in Unix seconds. With None, no grant holds.

        A model that only grants name is always in the limits. Its limit is 0 while none of these grants holds. So the
        models that a namespace may use do not change with time.
        """
        if not self.grants:
            return self
        written = self.limits if self.own is None else self.own
        limits = dict(written)
        granted = []
        for grant in self.grants:
            until = grant.times.next_change(moment) if moment is not None and grant.times.holds(moment) else None
            for model, added in grant.limits.items():
                own, limit = written.get(model), limits.setdefault(model, Limit(0))
                if until is not None and (own is None or not own.blocks):
                    limits[model] = added if limit.blocks else limit + added
                    granted.append(Granted(model, added, until, grant))
        return msgspec.structs.replace(self, limits=limits, own=written, granted=tuple(granted))

    def ends(self, model: str) -> float:
        """Return the next time when a granted part of the model's limit ends; infinite if none ends."""
        return min((each.until for each in self.granted if each.model == model), default=math.inf)


class Quota(msgspec.Struct, frozen=True, dict=True):
    """The whole quota. Its limits are as they are written or, after `at`, those of a moment. ``Quota()`` limits nobody.

    ``default``: the ``*`` entry for namespaces without their own entry; None if these are not limited. It never applies
    to the namespaces in ``system``, where a refused pod can stop the cluster. ``version``: the resourceVersion of the
    document. A count of pods at this version or a later one has every pod that an earlier document admitted, and that
    was stored by then.
    """

    namespaces: Mapping[str, NamespaceQuota] = {}
    default: NamespaceQuota | None = None
    system: frozenset[str] = SYSTEM_NAMESPACES
    version: str = ""
    moment: float | None = None
    """The moment of the limits that `for_namespace` returns, in Unix seconds; None if no grant holds."""

    @functools.cached_property
    def models(self) -> frozenset[str]:
        """All models that the quota limits, in any namespace, at any time."""
        own = (model for entry in self.entries.values() for model in entry.limits)
        return frozenset((*own, *(model for grant in self._grants for model in grant.limits)))

    @functools.cached_property
    def times(self) -> frozenset[Times]:
        return frozenset(grant.times for grant in self._grants)

    @property
    def entries(self) -> Mapping[str, NamespaceQuota]:
        """All entries as they are written, by the name of the namespace or `DEFAULT`."""
        return {**self.namespaces, **({DEFAULT: self.default} if self.default else {})}

    @property
    def _grants(self) -> Iterable[Grant]:
        return (grant for entry in self.entries.values() for grant in entry.grants)

    def at(self, moment: float) -> "Quota":
        return msgspec.structs.replace(self, moment=moment) if self.times else self

    def next_change(self, moment: float) -> float:
        """Return the first moment after this one at which a grant begins or ends; infinite if there is none."""
        return min((times.next_change(moment) for times in self.times), default=math.inf)

    def for_namespace(self, name: str) -> NamespaceQuota | None:
        """Return the quota of namespace ``name`` at the moment; None if the namespace is not limited."""
        own = self.namespaces.get(name)
        # A system namespace may have its own entry. Pods for which no webhook is called are only counted.
        if own is not None:
            return self._at_moment(own)
        return None if name in self.system or self.default is None else self._at_moment(self.default)

    def _at_moment(self, written: NamespaceQuota) -> NamespaceQuota:
        if not written.grants:
            return written
        known = self._known
        if id(written) not in known:
            known[id(written)] = written.at(self.moment)
        return known[id(written)]

    @functools.cached_property
    def _known(self) -> dict[int, NamespaceQuota]:
        # The limits of the moment, by the identity of the entry. They are kept, because every review needs them.
        return {}


class Charge(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The charge of one object, or of many together, to a namespace's quota of one model.

    ``cores`` are hundredths of a card. ``memory`` is requested memory in MiB. ``card_memory`` is memory that is
    requested as a part of a card, in hundredths of a card: an exclusive card, or a percentage. Its MiB follow from the
    limit in force (`memory_under`). So a record stays right if the limit changes.
    """

    cores: int = 0
    memory: int = 0
    card_memory: int = 0

    def __add__(self, other: "Charge") -> "Charge":
        return Charge(self.cores + other.cores, self.memory + other.memory, self.card_memory + other.card_memory)

    def __sub__(self, other: "Charge") -> "Charge":
        return Charge(self.cores - other.cores, self.memory - other.memory, self.card_memory - other.card_memory)

    def peak(self, other: "Charge") -> "Charge":
        """Return the larger amount of each resource, as Kubernetes compares init containers with the others."""
        return Charge(
            max(self.cores, other.cores), max(self.memory, other.memory), max(self.card_memory, other.card_memory)
        )

    def minimum(self, other: "Charge") -> "Charge":
        """Return the smaller amount of each resource."""
        return Charge(
            min(self.cores, other.cores), min(self.memory, other.memory), min(self.card_memory, other.card_memory)
        )

    def covers(self, other: "Charge") -> bool:
        """Return whether ``other`` has no larger amount of any resource."""
        return self.cores >= other.cores and self.memory >= other.memory and self.card_memory >= other.card_memory

    def memory_under(self, limit: Limit) -> int:
        """Return the memory under a limit in MiB, rounded up, so that many small shares cannot exceed the limit.

        The memory of a card is the limit's memory divided by its cards, or the memory that the limit states for a card.
        """
        memory, cores = (limit.card_memory, CORES_PER_CARD) if limit.cores is None else (limit.memory, limit.cores)
        if not memory or not cores:
            return self.memory
        return self.memory + -(-self.card_memory * memory // cores)

    def __str__(self) -> str:
        return f"{cards(self.cores)}, {mebibytes(self.memory)}" if self.memory else cards(self.cores)


def total(charges: Iterable[Charge]) -> Charge:
    # sum() would create a Charge for each addition. This runs for every pod, over up to 512 pending charges.
    cores = memory = card_memory = 0
    for charge in charges:
        cores += charge.cores
        memory += charge.memory
        card_memory += charge.card_memory
    return Charge(cores, memory, card_memory)


class Usage(msgspec.Struct, frozen=True, gc=False):
    """The usage of one model in a namespace.

    ``used`` is the sum. ``pending``: the part of pods that the watch has not shown yet. ``terminating``: the part of
    deleted pods whose containers may still run. ``reserved``: the part that webhook replicas may admit within seconds.
    """

    used: Charge = Charge()
    pending: Charge = Charge()
    terminating: Charge = Charge()
    reserved: Charge = Charge()

    @property
    def in_use(self) -> Charge:
        """The usage that people see. Reserved charges are shown separately, because no pod uses them yet."""
        return self.used - self.reserved


def fits(limit: Limit, used: Charge, asked: Charge) -> bool:
    """Return whether ``used`` and ``asked`` together stay within the limit of cores and the limit of memory."""
    after = used + asked
    if limit.cores is not None and after.cores > limit.cores:
        return False
    return limit.memory is None or after.memory_under(limit) <= limit.memory


class Shortage(msgspec.Struct, frozen=True, gc=False):
    """A request that does not fit a limit, with all figures that a person needs to understand it."""

    model: str
    asked: Charge
    usage: Usage
    limit: Limit

    @property
    def can_never_fit(self) -> bool:
        return not fits(self.limit, Charge(), self.asked)

    @property
    def rests_on_reserved(self) -> bool:
        """True if the request would fit without the reserved charges."""
        return fits(self.limit, self.usage.in_use, self.asked)

    @property
    def rests_on_pending(self) -> bool:
        """True if the request would fit without the pending and reserved charges."""
        return fits(self.limit, self.usage.in_use - self.usage.pending, self.asked)

    @property
    def in_cores(self) -> bool:
        """True if the refusal must name cores, and False if it must name memory."""
        cores, memory = self.limit.cores, self.limit.memory
        short = cores is not None and (self.usage.used + self.asked).cores > cores
        # A request for more memory than the limit can never fit, so the message must name the memory.
        hopeless = memory is not None and self.asked.memory_under(self.limit) > memory
        return short and (self.asked.cores > (cores or 0) or not hopeless)

    def sentence(self, namespace: str) -> str:
        """Return the refusal that people see in kubectl and in the Events of their ReplicaSet."""
        where = f"{self.model} in namespace {namespace}"
        usage, limit = self.usage, self.limit
        used = usage.in_use
        if self.in_cores and limit.cores is not None:
            parts = used.cores, usage.pending.cores, usage.terminating.cores, usage.reserved.cores
            return self._sentence(where, cards, self.asked.cores, parts, limit.cores)
        used_memory, total = used.memory_under(limit), usage.used.memory_under(limit)
        pending, terminating = usage.pending.memory_under(limit), usage.terminating.memory_under(limit)
        # These figures are differences of sums. The requested or reserved memory itself would be rounded up once more.
        asked = (usage.used + self.asked).memory_under(limit) - total
        parts = used_memory, pending, terminating, total - used_memory
        return self._sentence(f"memory of {where}", mebibytes, asked, parts, limit.memory or 0)

    def _sentence(
        self, what: str, render: Callable[[int], str], asked: int, parts: tuple[int, int, int, int], limit: int
    ) -> str:
        used, pending, terminating, reserved = parts

        def bare(amount: int) -> str:
            return render(amount).partition(" ")[0]

        missing = "can never fit" if self.can_never_fit else f"{bare(used + reserved + asked - limit)} more needed"
        still_running = f", {bare(terminating)} terminating" if terminating else ""
        taken = f"used: {bare(used)} ({bare(pending)} pending{still_running})"
        if reserved:
            taken += f", {bare(reserved)} reserved"
        return f"{what}, requested: {render(asked)}, {taken}, limited: {bare(limit)}, {missing}"


def exceeded(namespace: str, *shortages: Shortage) -> str:
    """Return the message for a request that fits none of the models that it may use."""
    return f"{OVER_QUOTA}: " + "; ".join(shortage.sentence(namespace) for shortage in shortages)


def free_of(limit: Limit, usage: Usage) -> str:
    """Return a phrase with the free part of a limit. A reserved part is not free, and is named."""
    if limit.cores is None:
        used, in_use = usage.used.memory_under(limit), usage.in_use.memory_under(limit)
        free = f"{(limit.memory or 0) - used} of {limit} free"
        return f"{free}, {used - in_use} reserved" if used > in_use else free
    free = f"{cards(limit.cores - usage.used.cores)} of {cards(limit.cores)} free"
    return f"{free}, {cards(usage.reserved.cores).partition(' ')[0]} reserved" if usage.reserved.cores else free
