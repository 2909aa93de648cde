"""Tests of the ledger of a namespace, and of how it is recounted from the stored objects."""

import msgspec
import pytest
from hypothesis import given, strategies as st

from tests.tables import cases
from vcuda.ledger.ledger import (
    MAX_PENDING,
    MAX_TERMINATING,
    Admitted,
    Ledger,
    Pending,
    Rejected,
    Reservation,
    Terminating,
    TooManyPending,
    admit,
    charges_by_model,
    is_counted_before,
    is_nearly_full,
    is_older,
)
from vcuda.ledger.recount import Expired, ObservedClaims, ObservedPods, recount
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Usage, total
from vcuda.quota.shortage import Shortage

QUOTA = NamespaceQuota({"M40": Limit(800), "P100": Limit(0), "A100": Limit(200, 1000)})
CARD = Pending("M40", Charge(100, 0, 100))
SHARE = Pending("A100", Charge(20, 300))


def held(number: int, pending: Pending = CARD) -> Ledger:
    return Ledger(pending={f"uid-{index}": pending for index in range(number)})


def granted(ledger: Ledger, asked: Pending = CARD, uid: str = "new", *, enforced: bool = True) -> Admitted:
    decision = admit(ledger, uid, asked, QUOTA, enforced=enforced)
    assert isinstance(decision, Admitted)
    return decision


def test_a_charge_is_added_to_the_pending_charges() -> None:
    before = Ledger({"M40": Charge(300)}, "77", {"old": CARD})
    decision = granted(before)
    assert decision.ledger == Ledger({"M40": Charge(300)}, "77", {"old": CARD, "new": CARD})
    assert decision.usage == Usage(used=Charge(500, 0, 200), pending=Charge(200, 0, 200))
    assert (decision.limit, decision.shortage) == (Limit(800), None)
    assert before.pending == {"old": CARD}, "the ledger that was read must not change"


@cases(
    "ledger",
    the_quota_has_room=held(1),
    the_quota_is_full_since=held(8),
    the_ledger_has_too_many_pending_charges_since=held(MAX_PENDING, Pending("M40", Charge(1, 1))),
)
def test_a_charged_uid_is_admitted_again_and_charged_once(ledger: Ledger) -> None:
    """The API server may call the webhook twice for the same pod."""
    decision = granted(ledger, uid="uid-0")
    assert decision.ledger is ledger
    assert decision.usage == ledger.usage("M40")


def test_committed_and_pending_count_alike() -> None:
    full = granted(Ledger({"M40": Charge(500)}, pending={"a": CARD, "b": CARD}))
    assert full.usage.used == Charge(800, 0, 300)
    assert isinstance(admit(full.ledger, "other", CARD, QUOTA, enforced=True), Rejected)


@cases(
    "ledger, asked, limit",
    one_core_over=(Ledger({"M40": Charge(701)}), CARD, Limit(800)),
    full_of_pending_charges=(held(8), CARD, Limit(800)),
    a_limit_of_0=(Ledger(), Pending("P100", Charge(1, 1)), Limit(0)),
    a_model_that_is_not_listed=(Ledger(), Pending("V100", Charge(1, 1)), Limit(0)),
    memory=(held(3, SHARE), Pending("A100", Charge(1, 101)), Limit(200, 1000)),
    the_limit_was_lowered_below_what_is_used=(Ledger({"M40": Charge(10_000)}), CARD, Limit(800)),
    reserved_by_a_replica=(Ledger(reserved={"replica": Reservation({"M40": Charge(800)}, 1)}), CARD, Limit(800)),
    terminating=(Ledger(terminating={"a": Terminating("M40", Charge(800), 30)}), CARD, Limit(800)),
    too_many_pending_charges_too=(held(MAX_PENDING), CARD, Limit(800)),
)
def test_a_rejection_has_every_figure(ledger: Ledger, asked: Pending, limit: Limit) -> None:
    decision = admit(ledger, "new", asked, QUOTA, enforced=True)
    assert decision == Rejected(Shortage(asked.model, asked.charge, ledger.usage(asked.model), limit))


@pytest.mark.parametrize("model", ["M40", "P100", "V100"])
def test_a_charge_over_a_quota_that_only_warns_is_still_charged(model: str) -> None:
    asked = Pending(model, Charge(900))
    decision = granted(Ledger(), asked, enforced=False)
    limit = QUOTA.limits.get(model, Limit(0))
    assert decision.ledger.pending == {"new": asked}
    assert decision.shortage == Shortage(model, asked.charge, Usage(), limit)
    assert decision.usage.used == asked.charge


@pytest.mark.parametrize("enforced", [True, False])
def test_a_namespace_has_at_most_512_pending_charges(enforced: bool) -> None:
    least = Pending("M40", Charge(1, 1))
    last = granted(held(511, least), least, enforced=enforced).ledger
    assert len(last.pending) == 512
    assert admit(last, "one-more", least, QUOTA, enforced=enforced) == TooManyPending()


def test_the_usage_lists_every_charged_model() -> None:
    pending, terminating = {"a": CARD, "b": SHARE, "c": SHARE}, {"d": Terminating("M40", Charge(100, 0, 100), 30)}
    ledger = Ledger({"P100": Charge(50, 10), "M40": Charge(100)}, "", pending, terminating)
    assert ledger.usages() == {
        "A100": Usage(used=Charge(40, 600), pending=Charge(40, 600)),
        "M40": Usage(Charge(300, 0, 200), pending=Charge(100, 0, 100), terminating=Charge(100, 0, 100)),
        "P100": Usage(used=Charge(50, 10), pending=Charge()),
    }
    assert list(ledger.usages()) == ["A100", "M40", "P100"]
    for model, usage in ledger.usages().items():
        assert ledger.usage(model) == usage
    assert (Ledger().usages(), Ledger().usage("M40")) == ({}, Usage())


@cases(
    "limit, used, nearly",
    below_nine_tenths_of_the_cores=(Limit(800), Charge(719), False),
    nine_tenths_of_the_cores=(Limit(800), Charge(720), True),
    all_cores=(Limit(800), Charge(800), True),
    nine_tenths_of_a_share=(Limit(70), Charge(63), True),
    below_nine_tenths_of_a_share=(Limit(70), Charge(62), False),
    below_nine_tenths_of_the_memory=(Limit(800, 1000), Charge(10, 899), False),
    nine_tenths_of_the_memory=(Limit(800, 1000), Charge(10, 900), True),
    nine_tenths_of_the_cards_memory=(Limit(800, 1000), Charge(10, 0, 720), True),
    memory_is_not_limited=(Limit(800), Charge(10, 10**6, 800), False),
)
def test_a_limit_is_nearly_full_from_nine_tenths(limit: Limit, used: Charge, nearly: bool) -> None:
    assert is_nearly_full(used, limit) is nearly


def test_reservations_do_not_make_a_limit_nearly_full() -> None:
    """No pod uses reserved quota yet."""
    usage = Usage(Charge(800), reserved=Charge(200))
    assert not is_nearly_full(usage.in_use, Limit(800))


def test_nearly_full_includes_the_new_charge() -> None:
    for cores, nearly in ((600, False), (700, True)):
        assert is_nearly_full(granted(Ledger({"M40": Charge(cores)})).usage.in_use, Limit(800)) is nearly


def test_charges_are_summed_by_model() -> None:
    stored = [("M40", Charge(100, 0, 100)), ("A100", Charge(20, 300)), ("M40", Charge(50, 256))]
    assert charges_by_model(stored) == {"M40": Charge(150, 256, 100), "A100": Charge(20, 300)}
    assert charges_by_model([]) == {}


ONE, TWO = ({"M40": Charge(100 * count, 0, 100 * count)} for count in (1, 2))
A, B, BOTH = {"a": CARD}, {"b": CARD}, {"a": CARD, "b": CARD}
OTHER = {"A100": Charge(9)}


@cases(
    "ledger, view, absent, recounted",
    stored=(Ledger({}, "5", A), ObservedPods("7", ONE, {"a"}), "", Ledger(ONE, "7")),
    stored_and_deleted=(Ledger({}, "5", A), ObservedPods("7", {}, {"a"}), "", Ledger({}, "7")),
    not_stored_yet=(Ledger(ONE, "5", A), ObservedPods("7", {}, ()), "", Ledger({}, "7", A)),
    another_model=(Ledger(ONE, "5"), ObservedPods("6", OTHER, ()), "", Ledger(OTHER, "6")),
    one_of_two_stored=(Ledger(ONE, "5", BOTH), ObservedPods("7", TWO, {"a"}), "", Ledger(TWO, "7", B)),
    proven_absent=(Ledger({}, "5", A), ObservedPods("7", {}, ()), "a", Ledger({}, "7")),
    absent_with_an_old_view=(Ledger(TWO, "9", BOTH), ObservedPods("8", ONE, {"a"}), "b", Ledger(TWO, "9", A)),
    a_view_of_the_same_version=(Ledger(TWO, "5"), ObservedPods("5", ONE, ()), "", Ledger(ONE, "5")),
    never_counted_before=(Ledger({}, ""), ObservedPods("1", ONE, ()), "", Ledger(ONE, "1")),
)
def test_a_recounted_ledger_counts_stored_pods_and_keeps_pending_charges(
    ledger: Ledger, view: ObservedPods, absent: str, recounted: Ledger
) -> None:
    assert recount(ledger, view, Expired(absent)) == recounted


RAN = Terminating("M40", CARD.charge, 600)
UNSEEN = Terminating("M40", CARD.charge, 30)
TORN = Ledger({}, "7", {}, {"a": RAN})


UNWATCHED = Ledger(ONE, "7", {}, {"M40@5": UNSEEN})


@cases(
    "ledger, view, ended, recounted",
    its_charge_was_committed=(Ledger(ONE, "5"), ObservedPods("7", {}, {"a"}, {"a": RAN}), "", TORN),
    its_charge_was_pending=(Ledger({}, "5", A), ObservedPods("7", {}, {"a"}, {"a": RAN}), "", TORN),
    it_is_not_charged_twice=(TORN, ObservedPods("9", ONE, "a", {"a": RAN}), "", Ledger(ONE, "9", {}, {"a": RAN})),
    terminating_time_over=(TORN, ObservedPods("9", {}, "a", {"a": RAN}), "a", Ledger({}, "9")),
    terminating_time_over_with_an_old_view=(TORN, ObservedPods("6", ONE, ()), "a", Ledger({}, "7")),
    no_watch_saw_the_deletion=(Ledger(TWO, "5"), ObservedPods("7", ONE, (), since="6"), "", UNWATCHED),
    and_another_pod_was_created=(Ledger(ONE, "5", A), ObservedPods("7", ONE, "a", since="6"), "", UNWATCHED),
    its_own_grace_period=(Ledger(ONE, "5"), ObservedPods("7", {}, "a", {"a": RAN}, since="6"), "", TORN),
    the_pod_had_ended=(Ledger(TWO, "5"), ObservedPods("7", ONE, "a", since="5"), "", Ledger(ONE, "7")),
)
def test_a_deleted_pod_that_may_still_run_stays_charged(
    ledger: Ledger, view: ObservedPods, ended: str, recounted: Ledger
) -> None:
    assert recount(ledger, view, Expired(terminating=ended)) == recounted
    assert recount(recounted, view, Expired(terminating=ended)).terminating == recounted.terminating


def test_an_absent_pod_that_may_have_been_deleted_unseen_stays_charged() -> None:
    recounted = recount(Ledger({}, "5", BOTH), ObservedPods("7", {}, ()), Expired({"a", "b"}, unsure={"a": 40, "b": 0}))
    assert recounted == Ledger({}, "7", terminating={"a": Terminating("M40", CARD.charge, 40)})


RESERVED = {"ended": Reservation(ONE, 1), "running": Reservation(ONE, 1)}


@cases(
    "version, recounted",
    with_its_count=("7", Ledger(ONE, "7", reserved={"running": RESERVED["running"]})),
    not_by_an_older_count=("4", Ledger({}, "5", reserved=RESERVED)),
)
def test_a_reservation_is_reaped_in_the_write_that_counts_its_pods(version: str, recounted: Ledger) -> None:
    ledger, view = Ledger({}, "5", reserved=RESERVED), ObservedPods(version, ONE, {"a"}, since=version)
    assert recount(ledger, view, Expired(replicas={"ended"})) == recounted


@cases(
    "ledger, seconds",
    of_a_counted_pod=(Ledger(ONE, "5", graces={"M40": 600}), 600),
    of_a_pending_pod=(Ledger({}, "5", {"a": Pending("M40", CARD.charge, 600)}), 600),
    of_another_model=(Ledger(ONE, "5", graces={"P100": 600}), 30),
)
def test_an_unseen_decrease_stays_charged_for_the_longest_grace_period(ledger: Ledger, seconds: int) -> None:
    recounted = recount(ledger, ObservedPods("7", {}, {"a"}, since="6"))
    assert recounted.terminating == {"M40@5": Terminating("M40", CARD.charge, seconds)}


def test_an_unseen_decrease_of_claims_stays_charged_for_the_longest_grace_period_of_their_pods() -> None:
    ledger = Ledger({}, "5", claimed=ONE, claim_resource_version="5", claim_grace=600)
    claims = ObservedClaims("7", {}, (), since="6")
    recounted = recount(ledger, ObservedPods("7", {}, (), claims=claims))
    assert recounted.terminating == {"M40@claims@5": Terminating("M40", CARD.charge, 600)}


@pytest.mark.parametrize(("users", "seconds"), [((), 0), ({"seen"}, 0), ({"unseen"}, 600)])
def test_the_grace_period_of_a_claim_stays_until_the_watch_has_shown_its_pods(users: set[str], seconds: int) -> None:
    claims = ObservedClaims("7", ONE, (), users=users)
    recounted = recount(Ledger({}, "5", claim_grace=600), ObservedPods("7", {}, {"seen"}, claims=claims))
    assert recounted.claim_grace == seconds


@cases(
    "listed, watched, since",
    the_watch_has_shown_every_deletion=({"a"}, ObservedPods("8", {}, {"a", "b"}, since="3", gone={"b"}), "3"),
    the_watch_lacks_a_deletion=({"a"}, ObservedPods("8", {}, {"a", "b"}, since="3"), "9"),
    the_watch_is_older_than_the_count=({"a"}, ObservedPods("4", {}, {"a"}, since="3"), "9"),
)
def test_a_list_replaces_no_deletion_that_the_watch_has_not_shown(
    listed: set[str], watched: ObservedPods, since: str
) -> None:
    """The ledger was counted at version 5. ``since``: the version from which on the watch has shown all deletions."""
    assert ObservedPods("9", {}, listed, since="9").after(watched, Ledger({}, "5")).since == since


def test_at_most_512_vanished_pods_are_kept_by_uid_and_the_others_stay_committed() -> None:
    """If the mode of a quota is not enforce, the number of pods has no limit, so any number of pods may vanish."""
    vanished = {f"uid-{number}": RAN for number in range(MAX_TERMINATING + 3)}
    recounted = recount(Ledger({}, "5"), ObservedPods("7", ONE, vanished.keys(), vanished))
    assert len(recounted.terminating) == MAX_TERMINATING
    assert recounted.committed == {"M40": Charge(400, 0, 400)}


CLAIMED = Ledger(ONE, "5", A, {}, "", TWO, "6")


@cases(
    "claims, recounted",
    stored=(ObservedClaims("8", ONE, {"a"}), Ledger(ONE, "7", {}, {}, "", ONE, "8")),
    one_deleted_one_not_stored_yet=(ObservedClaims("8", {}, ()), Ledger(ONE, "7", A, {}, "", {}, "8")),
    an_older_view_changes_neither_count=(ObservedClaims("5", {}, {"a"}), CLAIMED),
    nothing_new=(ObservedClaims("6", TWO, ()), CLAIMED),
    no_view_of_claims=(None, CLAIMED),
)
def test_claims_are_counted_at_their_own_version(claims: ObservedClaims | None, recounted: Ledger) -> None:
    assert recount(CLAIMED, ObservedPods("7", ONE, (), claims=claims)) == recounted
    assert recount(recounted, ObservedPods("4", {}, {"a"}, claims=ObservedClaims("99", {}, {"a"}))) == recounted
    assert recounted.usage("M40").used == total((*recounted.committed.values(), *recounted.claimed.values())) + total(
        each.charge for each in recounted.pending.values()
    )


@pytest.mark.parametrize(
    ("ledger", "before"),
    [(Ledger({}, "7"), True), (Ledger({}, "8"), False), (CLAIMED, True), (Ledger({}, "9", {}, {}, "", {}, "7"), True)],
)
def test_a_count_is_as_old_as_the_older_of_its_parts(ledger: Ledger, *, before: bool) -> None:
    assert is_counted_before(ledger, "8", "") == before


@cases(
    "ledger, view",
    nothing_new=(Ledger(ONE, "5", A), ObservedPods("7", ONE, ())),
    only_other_pods_are_new=(Ledger(ONE, "5", A), ObservedPods("7", ONE, {"x", "y"})),
    an_old_view_does_not_lower_the_count=(Ledger(TWO, "100", A), ObservedPods("99", ONE, ())),
    an_old_view_keeps_pending_charges=(Ledger(TWO, "100", A), ObservedPods("99", ONE, {"a"})),
)
def test_without_changes_nothing_is_written(ledger: Ledger, view: ObservedPods) -> None:
    """A leader that was suspended may have an old view of the pods. The view has deleted pods and lacks new pods."""
    assert recount(ledger, view, Expired({"z"})) is ledger


def test_a_count_from_before_an_edit_of_the_quota_is_renewed_even_if_it_is_equal() -> None:
    """The write records the quota's new version. Without this version, every replica would count the pods itself."""
    ledger, view = Ledger(ONE, "5", A), ObservedPods("7", ONE, ())
    assert recount(ledger, view, counted_since="6") == Ledger(ONE, "7", A)
    assert recount(ledger, view, counted_since="5") is ledger


@pytest.mark.parametrize(
    ("version", "than", "older"),
    [("9", "10", True), ("10", "9", False), ("10", "10", False), ("", "1", True), ("1", "", False), ("", "", False)],
)
def test_versions_are_compared_as_numbers(version: str, than: str, older: bool) -> None:
    assert is_older(version, than) is older


MODELS = ("M40", "P100")
UIDS = tuple("abcdef")
CHARGES = st.builds(Charge, st.integers(1, 300), st.integers(0, 500), st.integers(0, 300))
COMMITTED = st.dictionaries(st.sampled_from(MODELS), CHARGES)
VERSIONS = st.integers(0, 12).map(lambda version: str(version or ""))
PENDING = st.dictionaries(st.sampled_from(UIDS), st.builds(Pending, st.sampled_from(MODELS), CHARGES))
SECONDS = st.integers(0, 86400)
TERMINATING = st.dictionaries(
    st.sampled_from("uvwxyz"), st.builds(Terminating, st.sampled_from(MODELS), CHARGES, SECONDS)
)
LEDGERS = st.builds(Ledger, COMMITTED, VERSIONS, PENDING, TERMINATING, VERSIONS, COMMITTED, VERSIONS)
SOME = st.frozensets(st.sampled_from(UIDS))
CLAIMS = st.none() | st.builds(ObservedClaims, VERSIONS, COMMITTED, SOME)
VIEWS = st.builds(
    ObservedPods, VERSIONS, COMMITTED, SOME, TERMINATING, VERSIONS, config_version=VERSIONS, claims=CLAIMS
)


@given(ledger=LEDGERS, view=VIEWS, absent=SOME)
def test_a_charge_that_is_neither_seen_nor_proven_absent_stays(
    ledger: Ledger, view: ObservedPods, absent: frozenset[str]
) -> None:
    recounted = recount(ledger, view, Expired(absent))
    stale = view.is_older(ledger)
    claims = view.claims or ObservedClaims("", ledger.claimed, ())
    released = absent if stale else absent | set(view.seen) | set(claims.seen)
    assert recounted.pending == {uid: each for uid, each in ledger.pending.items() if uid not in released}
    assert recounted.committed == (ledger.committed if stale else view.committed)
    assert recounted.claimed == (ledger.claimed if stale else claims.committed)
    assert recounted.terminating.keys() >= ledger.terminating.keys() | (set() if stale else view.vanished.keys())


@given(ledger=LEDGERS, views=st.lists(VIEWS, max_size=5))
def test_the_count_never_reverts_to_an_older_version(ledger: Ledger, views: list[ObservedPods]) -> None:
    for view in views:
        recounted = recount(ledger, view)
        assert not is_older(recounted.pod_resource_version, ledger.pod_resource_version)
        assert not is_older(recounted.claim_resource_version, ledger.claim_resource_version)
        ledger = recounted


@given(ledger=LEDGERS, view=VIEWS, absent=SOME)
def test_recounting_twice_equals_recounting_once(ledger: Ledger, view: ObservedPods, absent: frozenset[str]) -> None:
    """If a repeated `recount` changed the ledger, two leaders would write forever. Its argument must not change."""
    before = msgspec.json.encode(ledger)
    once = recount(ledger, view, Expired(absent))
    assert recount(once, view, Expired(absent)) is once
    assert msgspec.json.encode(ledger) == before
