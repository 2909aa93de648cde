"""Tests of `total`, the limit of the cards of all GPU models together in one namespace."""

from collections.abc import Sequence
from fractions import Fraction
from http import HTTPStatus

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from examples.claims import claim, entry, spec, template
from tests.api_double import ApiDouble
from tests.builders import Manifest, vcuda_pod
from tests.tables import cases
from tests.unit.test_claim_review import Server
from tests.unit.test_ledger_client_rejections import Namespace
from tests.unit.test_quota_warnings import warnings
from tests.unit.test_reservations import cards, demand
from vcuda.admission_review import AdmissionResponse
from vcuda.ledger.ledger import Admitted, Ledger, Pending, Rejected, Reservation, Terminating, admit
from vcuda.ledger.recount import ObservedClaims, ObservedPods
from vcuda.quota import changes
from vcuda.quota.document import parse_quota
from vcuda.quota.model import Charge, Limit, Mode, NamespaceQuota, Usage, all_models
from vcuda.quota.shortage import Shortage
from webhook.ledger.charging import PutOff
from webhook.ledger.reservations import PART_OF_ROOM, plan_reservation

CARD = Charge(100, 0, 100)
LIMITS = {"A100": Limit(800), "T4": Limit(1600)}
QUOTA = NamespaceQuota(LIMITS, total=Limit(2000))


def decided(ledger: Ledger, model: str, asked: Charge = CARD, quota: NamespaceQuota = QUOTA) -> Admitted | Rejected:
    decision = admit(ledger, "new", Pending(model, asked), quota, enforced=quota.mode is Mode.ENFORCE)
    assert isinstance(decision, Admitted | Rejected)
    return decision


# Tests of the quota document


@cases(
    "text, total",
    cards=("total: 20", Limit(2000)),
    shares=("total: 2.25", Limit(225)),
    none_at_all=("total: 0", Limit(0)),
    above_the_sum_of_the_limits=("total: 100", Limit(10_000)),
    absent=("", None),
)
def test_total_is_a_number_of_cards(text: str, total: Limit | None) -> None:
    quota = parse_quota(f"team-a:\n  quota: {{A100: 8, T4: 16}}\n  {text}")
    assert quota.namespaces["team-a"] == NamespaceQuota(LIMITS, total=total)


def test_each_namespace_without_an_entry_has_the_total_of_the_default_entry() -> None:
    quota = parse_quota('"*": {quota: {T4: 4}, total: 2}')
    assert [quota.for_namespace(name) for name in ("a", "b")] == [
        NamespaceQuota({"T4": Limit(400)}, total=Limit(200))
    ] * 2


def test_a_grant_does_not_raise_total() -> None:
    written = parse_quota("a: {quota: {T4: 4}, total: 4, grants: [{T4: 8, until: 2100-01-01}]}").at(0)
    quota = written.for_namespace("a")
    assert quota
    assert (quota.limits, quota.total) == ({"T4": Limit(1200)}, Limit(400))


# Tests of the decision

USED: Sequence[tuple[str, Ledger]] = (
    ("committed", Ledger({"A100": Charge(800), "T4": Charge(1200)})),
    ("claimed", Ledger({"A100": Charge(800)}, claimed={"T4": Charge(1200)})),
    ("pending", Ledger({"A100": Charge(800)}, pending={"a": Pending("T4", Charge(1200))})),
    ("terminating", Ledger({"A100": Charge(800)}, terminating={"a": Terminating("T4", Charge(1200), 30)})),
    ("reserved", Ledger({"A100": Charge(800)}, reserved={"replica": Reservation({"T4": Charge(1200)}, 1)})),
    ("a model that the quota does not list", Ledger({"H100": Charge(2000)})),
)


@pytest.mark.parametrize("ledger", [ledger for _, ledger in USED], ids=[name for name, _ in USED])
def test_every_charge_of_every_model_counts_toward_the_total(ledger: Ledger) -> None:
    usage = ledger.total_usage()
    assert usage.used.cores == 2000
    assert decided(ledger, "T4") == Rejected(Shortage("T4", CARD, usage, Limit(2000), of_total=True))


@given(
    st.lists(st.tuples(st.sampled_from(["A100", "T4", "H100"]), st.fractions(0, 900, max_denominator=7)), max_size=12)
)
def test_the_total_is_exact_for_fractions_of_a_card(taken: list[tuple[str, Fraction]]) -> None:
    """A MIG profile may be charged 100/7 hundredths of a card. If charges were rounded, one too many could fit."""
    quota = NamespaceQuota({"A100": Limit(10_000), "T4": Limit(10_000), "H100": Limit(10_000)}, total=Limit(2000))
    ledger, admitted = Ledger(), Fraction(0)
    for number, (model, cores) in enumerate(taken):
        fits = admitted + cores <= 2000
        decision = admit(ledger, str(number), Pending(model, Charge(cores)), quota, enforced=True)
        assert isinstance(decision, Admitted) is fits
        if isinstance(decision, Admitted):
            ledger, admitted = decision.ledger, admitted + cores
    assert ledger.total_usage() == all_models(ledger.usages().values())
    assert ledger.total_usage().used.cores == admitted


@cases(
    "used, asked, quota, of_total, never",
    the_model_is_full=({"A100": 800}, ("A100", 1), QUOTA, False, False),
    all_models_together_are_full=({"A100": 500, "T4": 1500}, ("A100", 1), QUOTA, True, False),
    both_are_full=({"A100": 800, "T4": 1200}, ("A100", 1), QUOTA, False, False),
    larger_than_total=({"A100": 800}, ("A100", 3), NamespaceQuota(LIMITS, total=Limit(200)), True, True),
    larger_than_both=({}, ("A100", 9), NamespaceQuota(LIMITS, total=Limit(200)), True, True),
    a_total_of_0=({}, ("T4", 1), NamespaceQuota(LIMITS, total=Limit(0)), True, True),
    total_was_lowered=({"T4": 1000}, ("A100", 1), NamespaceQuota(LIMITS, total=Limit(500)), True, False),
)
def test_a_rejection_names_the_limit_that_binds(
    used: dict[str, int], asked: tuple[str, int], quota: NamespaceQuota, *, of_total: bool, never: bool
) -> None:
    ledger = Ledger({model: Charge(cores) for model, cores in used.items()})
    decision = decided(ledger, asked[0], cards(asked[1]), quota)
    assert isinstance(decision, Rejected)
    assert (decision.shortage.of_total, decision.shortage.can_never_fit) == (of_total, never)


def test_the_memory_of_the_models_does_not_count_toward_total() -> None:
    quota = NamespaceQuota({"A100": Limit(None, 400, 100), "T4": Limit(400, 400)}, total=Limit(200))
    one = decided(Ledger({"T4": Charge(100, 400)}), "A100", Charge(100, 100), quota)
    assert isinstance(one, Admitted)
    full = Ledger({"A100": Charge(100, 100), "T4": Charge(100, 400)})
    assert isinstance(decided(full, "A100", Charge(1, 1), quota), Rejected)


def test_a_namespace_without_total_is_decided_by_its_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "total_usage", lambda _: pytest.fail("the usage of all models was computed"))
    assert isinstance(decided(Ledger({"A100": Charge(800)}), "T4", quota=NamespaceQuota(LIMITS)), Admitted)
    assert isinstance(decided(Ledger({"A100": Charge(800)}), "A100", quota=NamespaceQuota(LIMITS)), Rejected)
    assert plan_reservation(Ledger(), NamespaceQuota(LIMITS), demand(A100=[CARD] * 12)).charges == {}


# Tests of reservations


@cases(
    "limit, used, others, reserved",
    a_tenth_of_the_free_total=(400, 100, {}, 30),
    total_leaves_room_for_20=(120, 100, {}, 2),
    near_total_nothing=(119, 100, {}, 0),
    over_a_lowered_total_nothing=(50, 100, {}, 0),
    the_reservations_of_others_are_not_free=(400, 100, {"other": Reservation({"T4": cards(281)}, 1)}, 0),
    at_most_a_quarter_with_the_others=(400, 100, dict.fromkeys("abc", Reservation({}, 1)), 18),
)
def test_the_reservations_of_all_models_together_are_within_a_part_of_the_free_total(
    limit: int, used: int, others: dict[str, Reservation], reserved: int
) -> None:
    quota = NamespaceQuota({model: Limit(100_000) for model in ("A100", "T4", "H100")}, total=Limit(100 * limit))
    ledger = Ledger({"A100": cards(used - 50), "T4": cards(50)}, reserved=others)
    wanted: dict[str, Sequence[Charge]] = {model: [CARD] * 12 for model in quota.limits}
    planned = plan_reservation(ledger, quota, demand(2.0, **wanted)).charges
    assert sum(each.cores for each in planned.values()) == 100 * reserved


@given(
    total=st.integers(0, 30_000),
    used=st.fractions(0, 30_000, max_denominator=7),
    sizes=st.lists(st.integers(1, 400), min_size=12, max_size=12),
    replicas=st.integers(0, 3),
)
def test_no_reservation_exceeds_the_free_total(total: int, used: Fraction, sizes: list[int], replicas: int) -> None:
    models = [f"model-{number}" for number in range(len(sizes))]
    quota = NamespaceQuota({model: Limit(100_000) for model in models}, total=Limit(total))
    ledger = Ledger({"H100": Charge(used)}, reserved={str(each): Reservation({}, 1) for each in range(replicas)})
    wanted: dict[str, Sequence[Charge]] = {
        model: [Charge(size)] * 12 for model, size in zip(models, sizes, strict=True)
    }
    planned = plan_reservation(ledger, quota, demand(2.0, **wanted)).charges
    reserved = sum(Fraction(each.cores) for each in planned.values())
    assert reserved * PART_OF_ROOM <= max(total - used, Fraction(0))


# Tests of rejections, which only stored objects cause


def test_only_stored_objects_of_all_models_cause_a_rejection_for_total(
    api: ApiDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace, quota = Namespace(api), NamespaceQuota({"M40": Limit(800), "P100": Limit(800)}, total=Limit(400))
    namespace.ledger(committed={"M40": cards(4)}, terminating={"gone": Terminating("P100", CARD, 30)})
    claims = ObservedClaims("1000", {"A100": CARD}, ())
    count = namespace.replica.store.count_pods
    monkeypatch.setattr(namespace.replica.store, "count_pods", lambda *args: replace(count(*args), claims=claims))
    for stored, outcome in ((3, Rejected), (2, Rejected), (1, PutOff)):
        namespace.pods(stored)
        decision = namespace.charge(model="P100", quota=quota)
        assert isinstance(decision, outcome)
        [short] = [decision.shortage] if isinstance(decision, Rejected) else decision.shortages
        assert short.of_total
    assert short.usage == Usage(cards(5), terminating=CARD)


def test_a_shortage_of_total_behind_one_of_a_model_is_confirmed_by_a_list_too(
    api: ApiDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger still counts a deleted pod of M40. After the LIST, the model has room, but the total is used up."""
    namespace, quota = Namespace(api), NamespaceQuota({"M40": Limit(400), "P100": Limit(800)}, total=Limit(300))
    namespace.ledger(committed={"M40": cards(4)})
    namespace.pods(3)
    count = namespace.replica.store.count_pods

    def counted(of: str, timeout: float) -> ObservedPods:
        found = count(of, timeout)
        namespace.ledger(committed={"M40": cards(3)}, pod_resource_version=found.resource_version)
        return found

    monkeypatch.setattr(namespace.replica.store, "count_pods", counted)
    decision = namespace.charge(quota=quota)
    assert isinstance(decision, Rejected)
    assert (decision.shortage.of_total, decision.shortage.usage.used) == (True, cards(3))


def test_a_charge_that_lacks_total_only_because_of_reservations_may_be_retried(api: ApiDouble) -> None:
    namespace, quota = Namespace(api), NamespaceQuota({"M40": Limit(400), "P100": Limit(800)}, total=Limit(400))
    namespace.ledger(committed={"M40": cards(2)}, reserved={"other": Reservation({"P100": cards(2)}, 1)})
    assert isinstance(decision := namespace.charge(quota=quota), PutOff)
    assert decision.soon
    assert namespace.replica.store.read("team-a").ledger.waiting


# Tests of the answers

NODE_QUOTA = NamespaceQuota({"A100": Limit(400), "M40": Limit(200)}, total=Limit(500))


def cards_pod(number: int) -> Manifest:
    return vcuda_pod({"nvidia.com/gpu": number})


def create_all(server: Server, *manifests: Manifest) -> list[AdmissionResponse]:
    return [server.create(manifest, f"uid-{number}") for number, manifest in enumerate(manifests)]


@pytest.mark.parametrize("made", [cards_pod(1), claim(entry())], ids=["pods", "claims"])
def test_pods_and_claims_of_all_models_use_up_total_and_the_choice_of_the_model_ignores_it(made: Manifest) -> None:
    answers = create_all(Server(NODE_QUOTA), *[made] * 6)
    assert [each.model for each in answers] == ["A100"] * 4 + ["M40"] * 2
    assert [each.allowed for each in answers] == [True] * 5 + [False]
    nearly = "the GPU quota is nearly used up:"
    assert answers[2].warnings == ()
    assert answers[3].warnings == (f"{nearly} A100 in namespace team-a, 4 cards of 4 cards",)
    assert answers[4].warnings == (f"{nearly} total in namespace team-a, 5 cards of 5 cards",)
    figures = "requested: 1 card, used: 5 (5 pending), limited: 5, 1 more needed"
    assert (answers[5].outcome, answers[5].status) == ("over-quota", HTTPStatus.FORBIDDEN)
    assert answers[5].message == f"exceeded quota: total in namespace team-a, {figures}"


@cases(
    "used, asked, told",
    not_now=(4, 2, "exceeded quota: total in namespace team-a, requested: 2 cards, used: 4 (4 pending), limited: 5, 1"),
    never=(0, 6, "larger than the GPU quota: total in namespace team-a, requested: 6 cards, used: 0 (0 pending), lim"),
    never_and_larger_than_each_model=(0, 7, "larger than the GPU quota: total in namespace team-a, requested: 7 cards"),
)
def test_a_rejection_says_whether_total_can_ever_permit_the_pod(used: int, asked: int, told: str) -> None:
    """Workflow engines wait after the words "exceeded quota", so these words must not appear if waiting is in vain."""
    quota = NamespaceQuota({"A100": Limit(600), "M40": Limit(600)}, total=Limit(500))
    *_, answer = create_all(Server(quota), *[cards_pod(1)] * used, cards_pod(asked))
    assert answer.message.startswith(told)
    assert answer.message.count("total in namespace") == 1


@cases(
    "total, used, asked, told",
    of_the_model=(16, 0, 9, "exceeded quota: A100 in namespace team-a, requested: 9 cards"),
    not_now=(8, 8, 1, "exceeded quota: A100 in namespace team-a, requested: 1 card, used: 8"),
    total_now=(4, 4, 1, "exceeded quota: total in namespace team-a, requested: 1 card, used: 4"),
    total_never=(8, 0, 9, "larger than the GPU quota: total in namespace team-a, requested: 9 cards"),
)
def test_no_grant_is_promised_to_a_pod_that_lacks_total(total: int, used: int, asked: int, told: str) -> None:
    text = f"a: {{quota: {{A100: 8}}, total: {total}, grants: [{{A100: 8, from: 2100-01-01}}]}}"
    server = Server(parse_quota(text).at(0).namespaces["a"])
    server.policy = replace(server.policy, quota=replace(server.policy.quota, moment=0.0))
    *_, answer = create_all(server, *[cards_pod(1)] * used, cards_pod(asked))
    assert answer.message.startswith(told)
    assert ("a grant adds 8 cards of A100" in answer.message) is ("A100 in namespace" in told)


@cases(
    "mode, warned",
    warn=(Mode.WARN, "exceeded quota: total in namespace team-a, requested: 1 card, used: 5 (5 pending), limited: 5"),
    audit=(Mode.AUDIT, ""),
)
def test_total_without_enforcement_rejects_nothing_and_counts_everything(mode: Mode, warned: str) -> None:
    server = Server(replace(NODE_QUOTA, mode=mode))
    *_, last = create_all(server, *[cards_pod(1)] * 6)
    assert (last.allowed, last.outcome) == (True, "over-quota-allowed")
    assert "; ".join(last.warnings).startswith(warned)
    assert sum(each.cores for each in server.used().values()) == 600


@cases(
    "used, asked, allowed, told",
    fits=(1, 4, True, ""),
    not_now=(3, 4, True, "must wait until the quota is free"),
    never=(0, 6, False, "larger than the GPU quota: total in namespace team-a"),
)
def test_a_template_whose_claims_total_never_permits_is_rejected(
    used: int, asked: int, allowed: bool, told: str
) -> None:
    server = Server(NamespaceQuota({"A100": Limit(800)}, total=Limit(500)))
    create_all(server, *[claim(entry())] * used)
    answer = server.create({**template(), "spec": {"spec": spec(entry(count=asked))}})
    assert (answer.allowed, told in "; ".join([answer.message, *answer.warnings])) == (allowed, True)


# Tests of edits

OLD = parse_quota("a: {quota: {A100: 8, T4: 16}, total: 20}\nb: {quota: {T4: 1}}")


@cases(
    "text, changed, warned",
    raised=("a: {quota: {A100: 8, T4: 16}, total: 22.5}", ["a.total: 20 cards -> 22.5 cards"], []),
    removed=(
        "a: {quota: {A100: 8, T4: 16}}",
        ["a.total: 20 cards -> nothing"],
        ["a.total: the limit of all models together (20 cards) is removed"],
    ),
    with_the_entry=(
        "",
        ["a: A100: 8 cards, T4: 16 cards, total: 20 cards -> nothing"],
        ["a: the entry (A100: 8 cards, T4: 16 cards, total: 20 cards) is removed. No limit applies any more"],
    ),
)
def test_a_changed_total_is_named_and_a_removed_one_is_a_warning(
    text: str, changed: list[str], warned: list[str]
) -> None:
    new = parse_quota(f"{text}\nb: {{quota: {{T4: 1}}}}")
    assert [str(change) for change in changes.changes(OLD, new)] == changed
    assert [*map(str, changes.weakened(OLD, new))] == warned


NO_EFFECT = "a.total: the limit of {} has no effect, because the limits of all models add up to {}"


@cases(
    "text, warned",
    below_the_sum=("a: {quota: {A100: 8, T4: 16}, total: 23.99}", []),
    the_sum=("a: {quota: {A100: 8, T4: 16}, total: 24}", [NO_EFFECT.format("24 cards", "24 cards")]),
    with_a_grant=("a: {quota: {A100: 1}, total: 1, grants: [{T4: 1, until: 2100-01-01}]}", []),
    after_the_grant=(
        "a: {quota: {A100: 1}, total: 1, grants: [{T4: 1, until: 2020-01-01}]}",
        ["a.grants[0]: the grant has ended and can be removed", NO_EFFECT.format("1 card", "1 card")],
    ),
)
def test_a_total_that_never_binds_is_a_warning(text: str, warned: list[str]) -> None:
    assert warnings(text, policy=None) == warned
    memory_alone = NamespaceQuota({"A100": Limit(None, 400, 100)}, total=Limit(900))
    assert [*changes.ineffective_total("a", memory_alone, 0.0)] == [], (
        "many shares may take more cards than this memory"
    )


def test_a_total_below_the_usage_is_a_warning() -> None:
    told = warnings("team-a: {quota: {M40: 8, P100: 8}, total: 3}", team_a=Usage(Charge(500), reserved=Charge(150)))
    text = "the limit is 3 cards, but the usage is 3.5 cards; new pods are rejected until less is in use"
    assert told == [f"team-a.total: {text}"]
