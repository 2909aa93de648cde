"""The charges of MIG profiles, by NVIDIA's published tables of the parts of a card that each profile takes.

The charge of a profile is the larger of its share of the card's compute slices and its share of the card's memory
slices. So however the cards are divided, their profiles are charged at least the compute and memory that they take.

Sources: NVIDIA MIG User Guide, "Supported MIG Profiles" (releases 580 and 610); for GH200 with 144 GB, GB200, B300 and
GB300 also NVIDIA/mig-parted, ``deployments/systemd/config-default.yaml``, and the release notes of the GPU operator.
"""

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction

import msgspec

from vcuda.quota.model import CORES_PER_CARD, Charge, exact
from vcuda.requests.folding import fold

PROFILE = "nvidia.com/mig-"
"""The text before a MIG profile in the name of a resource (MIG strategy ``mixed``)."""

# A suffix for media engines or graphics may follow the memory, as in 1g.10gb+me, 1g.24gb-me and 1g.24gb+me.all. Device
# plugins write `.` for `+`. A suffix does not change the charge, because it does not change the slices.
_PROFILE = re.compile(r"(([1-9])g\.([1-9][0-9]{0,3})gb)(?:[-+.][a-z]+)*", re.ASCII)

_CARD_MEMORY = 0.1
"""A card has the memory of a table if both differ by at most this part: drivers report a little less than the name."""

MODELS_REMEMBERED = 4096
"""The most charges that are cached, by model and profile."""


class MigTable(msgspec.Struct, frozen=True, eq=False):
    """NVIDIA's table of one product. ``slices`` and ``memory``: the compute and memory slices of one card."""

    product: str
    """A pattern that matches the product in the folded name of a GPU model or product."""
    slices: int
    memory: int
    profiles: Mapping[str, int]
    """The memory slices of each profile. Its name begins with its compute slices."""
    size: int
    """The memory of one card in GB, as in the product's name."""

    @property
    def name(self) -> str:
        """The first product of the table, as people write it."""
        first = self.product.partition("|")[0].replace("[18]", "1").replace("x?", "")
        return first.replace("[-_]?", " ").upper()

    def matches(self, name: str) -> bool:
        return re.search(rf"(?<![0-9a-z])(?:{self.product})(?![0-9a-z])", name) is not None

    def is_of_size(self, memory: int) -> bool:
        return abs(memory / 1024 - self.size) <= self.size * _CARD_MEMORY


def _sevenths(product: str, *sizes: int) -> MigTable:
    one, two, four, eight = sizes
    own = {f"1g.{one}gb": 1, f"1g.{two}gb": 2, f"2g.{two}gb": 2, f"3g.{four}gb": 4, f"4g.{four}gb": 4}
    return MigTable(product, 7, 8, {**own, f"7g.{eight}gb": 8}, eight)


def _halves(product: str, *sizes: int) -> MigTable:
    parts = [2**at for at in range(len(sizes))]
    profiles = {f"{part}g.{size}gb": part for part, size in zip(parts, sizes, strict=True)}
    return MigTable(product, parts[-1], parts[-1], profiles, sizes[-1])


TABLES = (
    _halves("a30", 6, 12, 24),
    _sevenths("a[18]00x?", 5, 10, 20, 40),
    _sevenths("a[18]00x?", 10, 20, 40, 80),
    _sevenths("h[18]00", 10, 20, 40, 80),
    _sevenths("h[18]00", 12, 24, 47, 94),
    _sevenths("h[18]00|h20|gh200", 12, 24, 48, 96),
    _sevenths("gh200", 18, 36, 72, 144),
    _sevenths("h200|h20", 18, 35, 71, 141),
    _sevenths("b200", 23, 45, 90, 180),
    _sevenths("gb200", 23, 47, 93, 186),
    _sevenths("gb200", 24, 47, 95, 189),
    _sevenths("b300", 34, 67, 135, 269),
    _sevenths("gb300", 35, 70, 139, 278),
    _halves("rtx[-_]?pro[-_]?6000", 24, 48, 96),
    _halves("rtx[-_]?pro[-_]?5000", 24, 48),
    _halves("rtx[-_]?pro[-_]?5000", 12, 24, 48),  # driver 580
    _halves("rtx[-_]?pro[-_]?4500", 16, 32),
)

# The MIG User Guide does not list these products. A product must be the beginning of a name, and a short product the
# whole name, because names such as gpu-l4, a2-highgpu-1g and p4-24xlarge may mean cards with MIG.
_WITHOUT_MIG = re.compile(
    r"(?:geforce|gtx|titan|quadro|rtx[-_]?a[0-9]{4}|rtx[-_]?[2-5]0[5-9]0|rtx[-_]?[456][05]00[-_]ada"
    r"|(?:tesla-)?(?:a10[gm]?|a16|a40|l4|l20|l40[gs]?|p40|p100|t4g?|v100s?))(?:[-_].*)?"
    r"|a2|l2|(?:tesla-)?p4",
    re.ASCII,
)


class MigSlices(msgspec.Struct, frozen=True):
    """The key ``mig`` of a GPU model in ``gpu_models``: the compute and memory slices of one card."""

    slices: int
    memory: int


class MigModel(msgspec.Struct, frozen=True):
    """The part of a model's entry in ``gpu_models`` that determines its MIG profiles."""

    products: tuple[str, ...] = ()
    """Patterns of the names of the model's products, as they are written in the ConfigMap."""
    memory: int = 0
    """The memory of one card of the model in MiB; 0 if it is unknown."""
    mig: MigSlices | None = None
    """The slices of one card; None if NVIDIA's tables apply."""


def read_profile(text: str) -> str:
    """Return the name of a MIG profile without its suffix, for example ``1g.10gb``; empty if it names no profile."""
    found = _PROFILE.fullmatch(text)
    return found[1] if found else ""


def unknown_profile(profile: str, model: str = "") -> str:
    """Return the message for a request of a MIG profile that no GPU model has, or that ``model`` does not have."""
    name = read_profile(profile) or profile[: len("1g.1000gb+me.all")]
    of = model or "MODEL"
    listed = ", ".join(dict.fromkeys(each.name for each in TABLES if name in each.profiles))
    known = f" of {model}. NVIDIA lists this profile for {listed or 'no product'}" if model else ""
    return (
        f"unknown MIG profile {name}{known}. Ask your administrator to add a line to `gpu_models` in the quota "
        f"ConfigMap: `{of}: {{mig: {{slices: 7, memory: 8}}, memory: 80Gi}}` with the slices and the memory of one "
        f"card, or to `gpu_units`: `{PROFILE}{name}: {{cards: 0.5}}`"
    )


class MigCharges:
    """The charge of each MIG profile on each GPU model. ``rows``: the entries of ``gpu_models`` by GPU model."""

    def __init__(self, rows: Mapping[str, MigModel]) -> None:
        self._rows = rows
        self._tables: Callable[[str], tuple[MigTable, ...]] = functools.lru_cache(MODELS_REMEMBERED)(self._tables_of)
        # The cache cannot grow beyond bounds: the caller passes only profiles without suffix, whose names are short.
        self.on: Callable[[str, str], Charge | None] = functools.lru_cache(MODELS_REMEMBERED)(self._on)
        self.anywhere: Callable[[str], Charge | None] = functools.lru_cache(MODELS_REMEMBERED)(self._anywhere)

    def _on(self, profile: str, model: str) -> Charge | None:
        """Return the charge of a profile on a GPU model; None if the model's cards have no such profile.

        If several products belong to the model, or no product is known, return the largest charge of the possible
        products.
        """
        row = self._rows.get(model, MigModel())
        if row.mig is not None:
            return _by_slices(profile, row.mig, row.memory, self._tables(model))
        return _dearest(profile, self._tables(model))

    def _anywhere(self, profile: str) -> Charge | None:
        """Return the largest charge of a profile on any GPU model; None if no model has such a profile."""
        stated = (_by_slices(profile, *card) for card in self.cards)
        return _peak(filter(None, (_dearest(profile, TABLES), *stated)))

    def has_mig(self, model: str) -> bool:
        """Return False if no product of the model has MIG and ``gpu_models`` states no slices."""
        return self._rows.get(model, MigModel()).mig is not None or bool(self._tables(model))

    @functools.cached_property
    def cards(self) -> Collection[tuple[MigSlices, int, tuple[MigTable, ...]]]:
        """The kinds of cards with MIG slices in ``gpu_models``: their slices, memory, and possible tables of NVIDIA."""
        return {(row.mig, row.memory, self._tables(model)) for model, row in self._rows.items() if row.mig}

    def _tables_of(self, model: str) -> tuple[MigTable, ...]:
        row = self._rows.get(model, MigModel())
        # Use the products of a model before the model's name, because the name may be any text.
        sources = (row.products, (model,))
        for names in sources:
            found = dict.fromkeys(each for name in names for each in _tables_of_name(fold(name), row.memory))
            if found:
                return tuple(found)
        has_none = any(names and all(_WITHOUT_MIG.fullmatch(fold(name)) for name in names) for names in sources)
        return () if has_none else TABLES


def _tables_of_name(name: str, memory: int) -> list[MigTable]:
    tables = [table for table in TABLES if table.matches(name)]
    numbers = {int(number) for number in re.findall(r"[0-9]{2,3}", name)}
    by_name = [table for table in tables if table.size in numbers]
    return by_name or [table for table in tables if table.is_of_size(memory)] or tables


def _dearest(profile: str, tables: Iterable[MigTable]) -> Charge | None:
    listed = (table for table in tables if profile in table.profiles)
    return _peak(_charge(profile, each.slices, Fraction(each.profiles[profile], each.memory)) for each in listed)


@functools.lru_cache(MODELS_REMEMBERED)
def _listed(card: MigSlices, tables: tuple[MigTable, ...]) -> Mapping[str, int]:
    """Return the memory slices of each profile that a table with the slices of ``card`` lists."""
    found: dict[str, int] = {}
    for each in tables:
        if (each.slices, each.memory) == (card.slices, card.memory):
            found |= {profile: max(taken, found.get(profile, 0)) for profile, taken in each.profiles.items()}
    return found


def _by_slices(profile: str, card: MigSlices, memory: int, tables: tuple[MigTable, ...]) -> Charge | None:
    slices, size = _amounts(profile)
    if slices > card.slices:
        return None
    taken = _listed(card, tables).get(profile, 0)
    if not taken and memory:
        # A profile's name has its memory in whole GB. So the nearest number of memory slices is meant.
        taken = max((2 * size * 1024 * card.memory + memory) // (2 * memory), 1)
    # If the memory of a card is unknown, assume that the profile has at least the same share of the card's memory
    # slices as of its compute slices, rounded up.
    taken = taken or -(-slices * card.memory // card.slices)
    return _charge(profile, card.slices, Fraction(taken, card.memory)) if taken <= card.memory else None


def _charge(profile: str, slices: int, memory: Fraction) -> Charge:
    compute, size = _amounts(profile)
    return Charge(exact(CORES_PER_CARD * max(Fraction(compute, slices), memory)), size * 1024)


def _amounts(profile: str) -> tuple[int, int]:
    slices, size = profile.removesuffix("gb").split("g.")
    return int(slices), int(size)


def _peak(charges: Iterable[Charge]) -> Charge | None:
    found = [*charges]
    return functools.reduce(Charge.peak, found) if found else None
