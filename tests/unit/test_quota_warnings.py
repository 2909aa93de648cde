"""Tests of the warnings about a valid edit of the quota: unknown names, missing namespaces, and the usage."""

from collections.abc import Mapping
from unittest import mock

import pytest

from tests.builders import LABELS, MODEL, POOL, nodes
from tests.tables import cases
from tests.unit.test_quota_edit import NOBODY, NODES, Used, config_map, edited, no_node
from vcuda.admission_review import AdmissionResponse
from vcuda.claims.charges import ClaimPolicy
from vcuda.claims.devices import ClassFacts, Devices
from vcuda.errors import Unavailable, UnreadableLedger, VcudaError
from vcuda.placement.nodes import COUNT_LABEL, Nodes
from vcuda.placement.registers import Card
from vcuda.quota.model import Charge, Limit, NamespaceQuota, Quota, Usage
from vcuda.requests.resources import BUILT_IN, CardModels, ProductRow
from vcuda.requests.schemes import HAMI
from webhook.review import quota_edit
from webhook.review.context import PolicySnapshot
from webhook.review.quota_edit import MAX_WARNINGS
from webhook.review.usage_warnings import READING_SECONDS


def warnings(document: str, policy: PolicySnapshot | None = NOBODY, **used: Charge | Usage | VcudaError) -> list[str]:
    answer = edited(document, policy, Used(**used))
    assert (answer.outcome, answer.allowed) == ("quota-accepted", True)
    return list(answer.warnings)


@cases(
    "document, told",
    known=("team-a: {quota: {M40: 8}, pool: [public]}", []),
    a_model_that_no_node_has=(
        "team-a: {quota: {M4O: 8}}",
        [f"team-a.quota.M4O: {no_node('M4O', 'did you mean M40?')}"],
    ),
    a_pool_that_no_node_has=(
        "team-a: {quota: {M40: 8}, pool: [lab, publik]}",
        [f"team-a.pool: no node has pool publik in label {POOL}"],
    ),
    in_the_default_entry=("'*': {quota: {V100: 1}}", [f"*.quota.V100: {no_node('V100', 'did you mean P100?')}"]),
    an_empty_document=("{}", []),
)
def test_names_that_no_node_has_give_a_warning(document: str, told: list[str]) -> None:
    assert warnings(document) == told


def test_a_cluster_without_a_gpu_node_gives_one_warning() -> None:
    told = warnings("team-a: {quota: {M40: 8}}", PolicySnapshot(Quota(), nodes()))
    assert told == [f"team-a.quota.M40: {no_node('M40', 'nodes have none')}"]


TAIL = "new pods are rejected until less is in use"
MEMORY = "M40: {cards: 8, memory: 1Gi}"


@cases(
    "limit, used, told",
    as_much_as_the_limit=("M40: 8", Charge(800), []),
    cards=("M40: 7.5", Charge(800), [f"the limit is 7.5 cards, but the usage is 8 cards; {TAIL}"]),
    blocked=("M40: 0", Charge(1), [f"the limit is 0 cards, but the usage is 0.01 cards; {TAIL}"]),
    a_model_no_longer_listed=("P100: 1", Charge(100), [f"the limit is 0 cards, but the usage is 1 card; {TAIL}"]),
    as_much_memory_as_the_limit=(MEMORY, Charge(10, 1024), []),
    memory=(
        MEMORY,
        Charge(10, 1025),
        [f"the limit is 8 cards, 1024 MiB, but the usage is 0.1 cards, 1025 MiB; {TAIL}"],
    ),
)
def test_a_limit_below_the_usage_gives_a_warning(limit: str, used: Charge, told: list[str]) -> None:
    expected = [f"team-a.quota.M40: {sentence}" for sentence in told]
    assert warnings(f"team-a: {{quota: {{{limit}}}}}", team_a=used) == expected


def test_reservations_are_not_in_use() -> None:
    reserved = Usage(Charge(500), reserved=Charge(100))
    assert warnings("team-a: {quota: {M40: 4}}", team_a=reserved) == []


def test_entries_that_do_not_change_are_not_compared_again() -> None:
    same = PolicySnapshot(Quota({"team-a": NamespaceQuota({"M40": Limit(100)})}), NODES)
    document = "{team-a: {quota: {M40: 1}}, team-b: {quota: {M40: 1}}}"
    told = warnings(document, same, team_a=Charge(900), team_b=Charge(900))
    assert [warning.partition(".")[0] for warning in told] == ["team-b"]


@pytest.mark.parametrize("error", [Unavailable("no answer"), UnreadableLedger("damaged")])
def test_an_edit_is_accepted_although_the_usage_is_not_known(error: VcudaError) -> None:
    told = warnings("{team-a: {quota: {M40: 1}}, team-b: {quota: {M40: 1}}}", team_a=error, team_b=Charge(200))
    assert told == [
        f"team-a: the quota was not compared with the current usage: {error}",
        f"team-b.quota.M40: the limit is 1 card, but the usage is 2 cards; {TAIL}",
    ]


def test_before_a_quota_is_in_force_only_the_usage_is_compared() -> None:
    """The stored document is malformed, so no quota is in force. The correction of the document must be accepted."""
    assert warnings("team-a: {quota: {M40: 1, X: 1}}", None, team_a=Charge(200)) == [
        f"team-a.quota.M40: the limit is 1 card, but the usage is 2 cards; {TAIL}"
    ]


def test_a_system_namespace_with_a_quota_gives_a_warning() -> None:
    [told] = warnings("kube-system: {quota: {M40: 1}}")
    assert told.startswith("kube-system: system namespace; if the webhook is not called for its pods, they are charged")


def test_an_edit_whose_usage_cannot_be_compared_in_time_is_accepted_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each ledger is read by an API call. If this took longer than the API server waits, no edit could be stored."""
    monkeypatch.setattr("webhook.review.usage_warnings.COMPARING_SECONDS", 0)
    document = "{a: {quota: {M40: 1}}, b: {quota: {M40: 1}}}"
    answer = edited(document, ledgers=Used(a=Charge(200), b=Charge(200)))
    told = "the usage could not be read in time; namespaces not compared with the usage: 2"
    assert answer == AdmissionResponse("quota-accepted", warnings=[told])
    many = ", ".join(f"X{number}: 1" for number in range(MAX_WARNINGS + 7))
    assert edited(f"team-a: {{quota: {{{many}}}}}").warnings[0].endswith("not compared with the usage: 1")


class Slow(Used):
    """Ledgers whose entry for namespace slow never answers. Each read of it takes all the time that it may take."""

    async def usage(self, namespace: str, *others: object) -> Mapping[str, Usage]:
        _, seconds = others
        if namespace != "slow":
            return await super().usage(namespace)
        assert isinstance(seconds, float)
        assert seconds <= READING_SECONDS
        raise Unavailable("the ledger could not be read in time")


def test_a_ledger_that_does_not_answer_delays_no_edit_and_the_others_are_compared() -> None:
    """A tenant can make its ledger slow to read. Then only the warning about its namespace is missing."""
    answer = edited("{slow: {quota: {M40: 1}}, b: {quota: {M40: 1}}}", ledgers=Slow(b=Charge(200)))
    assert answer.warnings == [
        "slow: the quota was not compared with the current usage: the ledger could not be read in time",
        f"b.quota.M40: the limit is 1 card, but the usage is 2 cards; {TAIL}",
    ]


def test_warnings_about_nodes_use_the_edited_rows_of_models() -> None:
    """By the edited gpu_models, a node's product M40 belongs to model Tesla.

    A DeviceClass offers nvidia.com/gpu, so `cards` in the row of Tesla has no effect.
    """
    whole = Devices(classes={"gpu.nvidia.com": ClassFacts(extended_resource="nvidia.com/gpu")})
    claims = ClaimPolicy.of(whole, NODES.model_of, Quota(), BUILT_IN)
    rows = "{Tesla: {products: ['?40'], cards: 0.5}, P100: []}"
    written = config_map("team-a: {quota: {Tesla: 1, M41: 1}}", rows)
    assert edited(None, PolicySnapshot(Quota(), NODES, claims=claims), object=written).warnings == [
        f"team-a.quota.M41: {no_node('M41', 'nodes have P100, Tesla')}",
        "gpu_models: `cards` of Tesla has no effect while a DeviceClass offers devices as nvidia.com/gpu",
    ]


def test_an_edit_that_renames_the_model_of_nodes_names_the_new_model() -> None:
    """The entry "*" was in the quota before the edit. After the edit, it would limit no node's model any more."""
    before = NODES.named_by(CardModels({"Tesla": ProductRow(("M*",))}))
    written = config_map('{"*": {quota: {Tesla: 1, P100: 1}}}', "{Maxwell: ['M*']}")
    answer = edited(None, PolicySnapshot(Quota({}, NamespaceQuota({"Tesla": Limit(100)})), before), object=written)
    renamed = "by this `gpu_models`, the nodes of Tesla have model Maxwell; write Maxwell"
    assert f"*.quota.Tesla: {renamed}" in answer.warnings


EXISTING = frozenset({"team-a", "team-b", "default"})


@cases(
    "document, told",
    a_typo=("{team-aa: {quota: {M40: 1}}}", ["team-aa: namespace not found; did you mean `team-a`?"]),
    nothing_near=("{lab: {quota: {M40: 1}}}", ["lab: namespace not found"]),
    one_that_exists=("{team-b: {quota: {M40: 1}}}", []),
    all_others=('{"*": {quota: {M40: 1}}}', []),
)
def test_a_new_entry_without_a_namespace_gives_a_warning(document: str, told: list[str]) -> None:
    assert list(edited(document, namespaces=lambda: EXISTING).warnings) == told


def test_an_entry_that_was_there_before_is_not_looked_up() -> None:
    before = PolicySnapshot(Quota({"gone": NamespaceQuota({"M40": Limit(100)})}), NODES)
    answer = edited("gone: {quota: {M40: 2}}", before, namespaces=lambda: pytest.fail("looked up"))
    assert not answer.warnings


def test_an_edit_is_accepted_while_the_namespaces_cannot_be_listed() -> None:
    def silent() -> frozenset[str]:
        raise Unavailable("no answer")

    told = "the webhook could not check whether the namespaces of the new entries exist: no answer"
    assert edited("team-a: {quota: {M40: 1}}", namespaces=silent).warnings == [told]


def test_the_value_of_a_device_without_effect_on_hami_nodes_gives_a_warning() -> None:
    registers = {"node-1": {HAMI.name: (Card("GPU-1", "Tesla M40"),)}}
    nodes = Nodes.of({"node-1": {LABELS.model: "M40"}, "node-2": {LABELS.model: "P100"}}, LABELS, registers)
    written = config_map("team-a: {quota: {M40: 1}}", "{M40: {cards: 0.5}, P100: {cards: 0.5}}")
    assert edited(None, PolicySnapshot(Quota(), nodes), object=written).warnings == [
        "gpu_models: `cards` of M40 has no effect while a node of this model has a register of HAMi",
    ]


def test_warnings_end_before_the_api_server_cuts_them_off() -> None:
    models = ", ".join(f"X{number}: 1" for number in range(MAX_WARNINGS + 7))
    told = warnings(f"team-a: {{quota: {{{models}}}}}")
    assert len(told) == MAX_WARNINGS + 1
    assert told[-1] == "7 more warnings are not shown"


def test_warnings_that_differ_only_in_the_field_are_one_line_with_their_number() -> None:
    entries = "".join(f"team-{number}: {{quota: {{M4O: 1, M40: 1}}, pool: [publik]}}\n" for number in range(30))
    models = "team-0.quota.M4O, team-1.quota.M4O, team-2.quota.M4O and 27 more"
    assert warnings(f"{entries}last: {{quota: {{M4O: 1, B200: 1}}}}") == [
        f"{models.replace('27', '28')}: {no_node('M4O', 'did you mean M40?')}",
        f"team-0.pool, team-1.pool, team-2.pool and 27 more: no node has pool publik in label {POOL}",
        f"last.quota.B200: {no_node('B200')}",
    ]


def test_lost_entries_and_raised_limits_are_the_first_of_many_warnings() -> None:
    counted = nodes(a={MODEL: "M40", COUNT_LABEL: "4"})
    before = PolicySnapshot(Quota({"team-a": NamespaceQuota({"M40": Limit(100)})}), counted)
    models = ", ".join(f"X{number}: 1" for number in range(MAX_WARNINGS + 7))
    answer = edited(f"team-b: {{quota: {{M40: 800, {models}}}}}", before, namespaces=frozenset)
    assert [text.partition(":")[0] for text in answer.warnings[:4]] == ["team-a", "team-b.quota.M40", "M40", "team-b"]
    assert answer.warnings[3] == "team-b: namespace not found"


def test_only_as_many_unknown_models_as_are_shown_are_compared_with_the_known_models() -> None:
    """An edit may name ten thousand unknown models. A comparison of all of them would take seconds."""
    models = ", ".join(f"M4{number}: 1" for number in range(1, 500))
    with mock.patch.object(quota_edit, "nearest", return_value="did you mean M40?") as nearest:
        warnings(f"team-a: {{quota: {{{models}}}}}")
    assert nearest.call_count == MAX_WARNINGS
