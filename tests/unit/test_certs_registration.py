"""Tests of the registration of webhooks by the rotation: when, with which CAs, and by which annotation."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import yaml
from hypothesis import given, strategies as st

from certs import registration
from certs.parsing import ObjectRefs
from certs.rotation import DryRunStore, Rotation
from certs.state import Configuration, Declared, Hook, Serving, State
from certs.steps import Done, IssueLeaf, MakeAuthority, Promote, RegisterWebhooks, RotationPolicy, StepRejected, Wait
from tests.rotation_world import NAMES, POLICY, START, Pod, World, healthy
from tests.tables import cases
from vcuda.registration import ANNOTATION, UnusableDeclaration
from vcuda.x509 import Names

REFS = ObjectRefs("vcuda-quota", "vcuda-webhook", "ca", "tls")
SERVICE = {"namespace": "vcuda-quota", "name": "vcuda-webhook", "path": "/validate"}
REGISTERING = RotationPolicy(Names(), registers_only=True)


def webhook(name: str = "validate.quota.vcuda.io", **fields: Any) -> dict[str, Any]:
    return {"name": name, "clientConfig": {"service": SERVICE}, **fields}


def unregistered(kind: str = "ValidatingWebhookConfiguration", name: str = "validate") -> Configuration:
    declared = Declared((webhook(name),), (Hook(0, name, ()),), "no webhook is registered yet")
    return Configuration(kind, "vcuda-quota", "1", (), declared=declared)


def first_start() -> World:
    """Return a new installation. Its first pod becomes ready 20 s after it has a certificate."""
    configurations = (unregistered("MutatingWebhookConfiguration", "mutate"), unregistered())
    pod = Pod("10.0.0.1:8443", timedelta(seconds=20), ready=False)
    return World(State(configurations=configurations), [pod])


def test_the_first_run_issues_certificates_waits_for_a_replica_and_registers_the_mutating_webhooks_first() -> None:
    world = first_start()
    taken, _ = world.go_on(Wait, POLICY)
    assert taken == [MakeAuthority, Promote, IssueLeaf]
    assert not [*world.state.hooks()]
    world.sleep(20)
    world.pods[0].ready = True
    world.look()
    step = world.take(POLICY)
    assert isinstance(step, RegisterWebhooks)
    assert step.configuration.startswith("mutating")
    taken, _ = world.go_on(Done, POLICY)
    assert taken[:1] == [RegisterWebhooks]
    assert world.works()
    registered = [hook.name for hook in world.state.hooks()]
    assert registered == ["mutate", "validate"]
    assert [hook.bundle for hook in world.state.hooks()] == [(world.current.certificate,)] * 2


@pytest.mark.parametrize("policy", [POLICY, REGISTERING], ids=["rotate", "register"])
def test_a_dry_run_ends_at_once_if_no_replica_answers(policy: RotationPolicy) -> None:
    copy = DryRunStore(first_start().state, START)
    reasons: list[str] = []
    ended = Rotation(
        copy, policy, timedelta(days=2), copy, lambda each: reasons.append(each.reason), simulated=True
    ).run()
    assert isinstance(ended, Wait)
    assert reasons[-1] == ended.reason
    assert copy.now() - START < timedelta(minutes=1)


@pytest.mark.parametrize("ready", [False, True], ids=["not ready", "a leaf of an unknown issuer"])
def test_nothing_is_registered_for_a_replica_that_cannot_be_called(ready: bool) -> None:
    world = healthy(timedelta())
    stranger = healthy(timedelta()).leaf.certificate
    world.put(configurations=(unregistered(),))
    world.pods = [Pod("10.0.0.1:8443", timedelta(), stranger, ready=ready)]
    assert not isinstance(world.decide(POLICY), RegisterWebhooks)


def test_webhooks_that_differ_keep_the_cas_that_they_trust_and_are_registered_again() -> None:
    stranger = healthy().current.certificate
    world = healthy(timedelta())
    [mutating, validating] = world.state.configurations
    hooks = tuple(replace(hook, bundle=(stranger, *hook.bundle)) for hook in validating.hooks)
    declared = Declared((webhook("validate"), webhook("config")), hooks, "not as declared: validate")
    world.put(configurations=(mutating, replace(validating, hooks=hooks[:1], declared=declared)))
    step = world.take(POLICY)
    assert isinstance(step, RegisterWebhooks)
    assert world.state.configurations[1].bundles() == ((stranger, world.current.certificate),) * 2
    assert not isinstance(world.decide(POLICY), RegisterWebhooks)


def test_a_start_that_takes_longer_than_a_leaf_needs_is_reported() -> None:
    world = first_start()
    world.go_on(Wait, POLICY)
    world.sleep(timedelta(minutes=11).total_seconds())
    decision = world.decide(POLICY)
    assert isinstance(decision, StepRejected)
    assert "no endpoint is ready" in decision.problems[0].text


def test_if_another_tool_issues_certificates_only_its_ca_is_registered() -> None:
    world = healthy(timedelta())
    authorities = (world.current.certificate,)
    world.put(
        configurations=(unregistered(),), serving=Serving(authorities=authorities), authorities=State().authorities
    )
    taken, decision = world.go_on(Done, REGISTERING)
    assert taken == [RegisterWebhooks]
    assert [hook.bundle for hook in world.state.hooks()] == [authorities]
    assert decision == Done(None, "all declared webhooks are registered")


def test_if_another_tool_issues_certificates_a_run_waits_for_the_first_one() -> None:
    world = World(State(configurations=(unregistered(),)), [Pod("10.0.0.1:8443", timedelta())])
    assert isinstance(world.decide(REGISTERING), Wait)


# Tests of the annotation that declares the webhooks of a configuration


def item(text: object, webhooks: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"metadata": {"name": "vcuda-quota", "annotations": {ANNOTATION: text}}, "webhooks": webhooks}


def declared(text: object, webhooks: list[dict[str, Any]] | None = None) -> Declared | None:
    return registration.declared(item(text, webhooks), "ValidatingWebhookConfiguration", REFS)


def test_a_declaration_takes_the_registered_ca_bundles_of_the_same_names() -> None:
    there = [{"name": "validate.quota.vcuda.io", "clientConfig": {"service": SERVICE, "caBundle": "QQ=="}}]
    found = declared(yaml.safe_dump([webhook(), webhook("other")]), there)
    assert found is not None
    assert [each["clientConfig"].get("caBundle") for each in found.webhooks] == ["QQ==", None]
    assert [hook.server for hook in found.hooks] == [NAMES.dns[2]] * 2


def test_webhooks_of_another_service_are_not_ours_to_register() -> None:
    elsewhere = {"name": "validate", "clientConfig": {"service": {**SERVICE, "name": "another"}}}
    assert declared(yaml.safe_dump([elsewhere])) is None
    assert registration.declared({"metadata": {"name": "n"}}, "ValidatingWebhookConfiguration", REFS) is None


@given(st.one_of(st.text(), st.integers(), st.none(), st.lists(st.text()).map(yaml.safe_dump)))
def test_any_text_is_at_most_an_unusable_declaration(text: object) -> None:
    with pytest.raises(UnusableDeclaration):
        declared(text)


@cases(
    "text",
    empty_integer='- !!int ""',
    no_boolean="- !!bool x",
    no_time='- !!timestamp "x"',
    date="- 2026-01-01",
    itself="&a [*a]",
    two_documents="- a\n---\n- b",
    repeating_aliases="\n".join(
        f"- &a{each} [{', '.join([f'*a{each - 1}'] * 10 if each else ['x'])}]" for each in range(9)
    ),
)
def test_yaml_that_cannot_be_constructed_is_an_unusable_declaration(text: str) -> None:
    with pytest.raises(UnusableDeclaration) as raised:
        declared(text)
    assert len(str(raised.value)) < 300


@cases(
    "there, difference",
    the_same=([webhook("a"), webhook("b")], ""),
    none=([], "no webhook is registered yet"),
    one_less=([webhook("a")], "the webhooks differ from {}: b"),
    one_more=([webhook("a"), webhook("b"), webhook("c")], "the webhooks differ from {}: c"),
    changed=([webhook("a"), webhook("b", failurePolicy="Ignore")], "the webhooks differ from {}: b"),
    another_order=([webhook("b"), webhook("a")], "the webhooks are not in the order of {}"),
)
def test_a_difference_names_the_webhooks(there: list[dict[str, Any]], difference: str) -> None:
    expected = difference.format(f"annotation {ANNOTATION}")
    assert registration.difference([webhook("a"), webhook("b")], there) == expected
