"""Tests of the check that the API server has the webhooks and policies of the manifests, and applies them."""

import base64
import json
import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from controller.registration import RegistrationWatch
from tests.api_double import ApiDouble
from tests.installed import (
    DEFAULTS,
    OF_BINDING,
    OF_MUTATING,
    OF_POLICY,
    OF_VALIDATING,
    documents,
    path_of,
    with_webhooks,
)
from tests.rendered import MANIFESTS
from tests.tables import cases
from tools import policies
from vcuda.errors import Conflict, Forbidden, Unavailable, VcudaError
from vcuda.registration import (
    ANNOTATION,
    BINDING,
    CALLED,
    DECLARED,
    MUTATING,
    POLICIES,
    POLICY,
    PROBE,
    RESOURCES,
    VALIDATING,
)
from vcuda.x509 import make_authority

Json = dict[str, Any]


class Registered(ApiDouble):
    """An API server with all objects that the manifests declare. ``changes`` counts the announced changes."""

    def __init__(self) -> None:
        super().__init__()
        for manifest in map(with_webhooks, documents("registration.yaml")):
            self.store(path_of(manifest), manifest)
        for manifest in (*documents("policies.yaml"), *documents("usage-policy.yaml")):
            self.store(path_of(manifest), manifest)
        self.changes = 0
        self.evaluates = self.calls_webhook = True
        self.fault: VcudaError | None = None
        self.watch = RegistrationWatch(self.kube, lambda: self.evaluates, self.announce)
        self.registry = CollectorRegistry()
        self.registry.register(self.watch)

    def announce(self) -> None:
        self.changes += 1

    def post(self, path: str, body: bytes, params: Any = None, timeout: float = 10) -> bytes:
        assert (path, params) == ("/api/v1/namespaces/kube-system/configmaps", {"dryRun": "All"})
        metadata = json.loads(body)["metadata"]
        assert (metadata["name"], metadata["labels"]) == (PROBE, {"quota.vcuda.io/config": "true"})
        if self.fault:
            raise self.fault
        if self.calls_webhook:
            raise Forbidden(403, f'admission webhook "config.quota.vcuda.io" denied the request: {CALLED}')
        return self.get(OF_POLICY, timeout=timeout)

    def found(self) -> str:
        self.watch.check(lambda _: False)
        return self.watch.text

    def metric(self, kind: str, name: str) -> float | None:
        return self.registry.get_sample_value("vcuda_registration_missing", {"kind": kind, "name": name})


@pytest.fixture
def api() -> Registered:
    return Registered()


def first_webhook(path: str, **fields: object) -> Callable[[ApiDouble], None]:
    return lambda api: api.objects[path]["webhooks"][0].update(fields)


def spec(path: str, **fields: object) -> Callable[[ApiDouble], None]:
    return lambda api: api.objects[path]["spec"].update(fields)


def annotated(text: str | None) -> Callable[[ApiDouble], None]:
    annotations = {} if text is None else {ANNOTATION: text}
    return lambda api: api.objects[OF_VALIDATING]["metadata"].update(annotations=annotations)


def validation(**fields: object) -> Callable[[ApiDouble], None]:
    return lambda api: api.objects[OF_POLICY]["spec"]["validations"][0].update(fields)


def constraint(**fields: object) -> Callable[[ApiDouble], None]:
    return lambda api: api.objects[OF_POLICY]["spec"]["matchConstraints"].update(fields)


SERVICE = {"service": {"namespace": "vcuda-quota", "name": "vcuda-webhook", "path": "/validate", "port": 443}}
NEVER = {"name": "never", "expression": "false"}
NARROWED = [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}]


@cases(
    "damage, kind, text",
    mutating_deleted=(lambda api: api.remove(OF_MUTATING), MUTATING, "00-vcuda-quota does not exist"),
    validating_deleted=(lambda api: api.remove(OF_VALIDATING), VALIDATING, "vcuda-quota does not exist"),
    policy_deleted=(lambda api: api.remove(OF_POLICY), POLICY, "ledgers.quota.vcuda.io does not exist"),
    binding_deleted=(lambda api: api.remove(OF_BINDING), BINDING, "ledgers.quota.vcuda.io does not exist"),
    a_webhook_removed=(
        lambda api: api.objects[OF_VALIDATING]["webhooks"].pop(0),
        VALIDATING,
        "lacks or changes the webhooks validate.quota.vcuda.io",
    ),
    every_webhook_removed=(lambda api: api.objects[OF_VALIDATING].pop("webhooks"), VALIDATING, "has no webhooks yet"),
    failures_ignored=(
        first_webhook(OF_VALIDATING, failurePolicy="Ignore"),
        VALIDATING,
        "validate.quota.vcuda.io (failurePolicy)",
    ),
    objects_selected=(
        first_webhook(OF_VALIDATING, objectSelector={"matchLabels": {"gpu": "yes"}}),
        VALIDATING,
        "validate.quota.vcuda.io (objectSelector)",
    ),
    namespaces_selected=(
        lambda api: api.objects[OF_VALIDATING]["webhooks"][0]["namespaceSelector"].update(matchLabels={"gpu": "yes"}),
        VALIDATING,
        "validate.quota.vcuda.io",
    ),
    conditions_added=(
        lambda api: api.objects[OF_VALIDATING]["webhooks"][1].update(matchConditions=[NEVER]),
        VALIDATING,
        "config.quota.vcuda.io",
    ),
    fewer_rules=(first_webhook(OF_VALIDATING, rules=[]), VALIDATING, "validate.quota.vcuda.io"),
    ca_bundle_emptied=(
        lambda api: api.objects[OF_MUTATING]["webhooks"][0]["clientConfig"].update(caBundle=""),
        MUTATING,
        "lacks or changes the webhooks mutate.quota.vcuda.io (caBundle)",
    ),
    annotation_removed=(annotated(None), VALIDATING, f"lacks the annotation {ANNOTATION}"),
    annotation_unusable=(annotated("7"), VALIDATING, "the value must be a list of webhooks"),
    ca_bundle_of_another_ca=(
        first_webhook(OF_VALIDATING, clientConfig={**SERVICE, "caBundle": "T3RoZXI="}),
        VALIDATING,
        "has webhooks whose caBundles have no common CA",
    ),
    policy_ignores_failures=(
        spec(OF_POLICY, failurePolicy="Ignore"),
        POLICY,
        "differs from the manifests in failurePol",
    ),
    policy_admits_all=(validation(expression="true"), POLICY, "differs from the manifests in validations"),
    policy_without_a_validation=(spec(OF_POLICY, validations=[]), POLICY, "differs from the manifests in validations"),
    policy_with_a_condition=(
        spec(OF_POLICY, matchConditions=[NEVER]),
        POLICY,
        "differs from the manifests in matchConditions",
    ),
    policy_with_another_variable=(
        spec(OF_POLICY, variables=[{"name": "user", "expression": "''"}]),
        POLICY,
        "differs from the manifests in variables",
    ),
    policy_with_fewer_rules=(constraint(resourceRules=NARROWED), POLICY, "in matchConstraints"),
    policy_with_excluded_rules=(constraint(excludeResourceRules=NARROWED), POLICY, "in matchConstraints"),
    policy_without_a_namespace=(
        constraint(namespaceSelector={"matchLabels": {"kubernetes.io/metadata.name": "team-a"}}),
        POLICY,
        "in matchConstraints",
    ),
    binding_only_audits=(spec(OF_BINDING, validationActions=["Audit"]), BINDING, "does not bind its policy"),
    binding_selects=(spec(OF_BINDING, matchResources={"resourceRules": NARROWED}), BINDING, "does not bind its policy"),
)
def test_a_missing_or_changed_object_is_reported_until_it_is_restored(
    api: Registered, damage: Callable[[ApiDouble], object], kind: str, text: str
) -> None:
    names = {MUTATING: "00-vcuda-quota", VALIDATING: "vcuda-quota"}
    name, restore = names.get(kind, "ledgers.quota.vcuda.io"), api.backup()
    assert api.found() == ""
    assert api.metric(kind, name) == 0
    damage(api)
    assert api.found().startswith(f"{kind} {name} ")
    assert text in api.found()
    assert api.metric(kind, name) == 1
    restore()
    assert api.found() == ""
    assert api.metric(kind, name) == 0
    assert api.changes == 2


def test_policies_with_the_defaults_and_texts_of_an_api_server_are_as_declared(api: Registered) -> None:
    for path, stored in api.objects.items():
        if "/validatingadmissionpolicies/" in path:
            constraints = stored["spec"]["matchConstraints"]
            stored["spec"]["matchConstraints"] = {"namespaceSelector": {}, **DEFAULTS, **constraints}
            for rule in constraints["resourceRules"]:
                rule.setdefault("scope", "*")
            for each in stored["spec"]["validations"]:
                each["message"] = "another text"
    assert api.found() == ""


VALUES = {
    "namespaces.system": "gpus",
    "namespaces.ledgers": "ledgers",
    "namespaces.nodeAgent": "agents",
    "quota.namespace": "gpu-quotas",
    "quota.name": "quota",
}


def policies_of_the_chart() -> list[Json]:
    text = (MANIFESTS / "chart" / "templates" / "policies.yaml").read_text(encoding="utf-8")
    text = re.sub(r"{{ \.Values\.([\w.]+) }}", lambda found: VALUES[found[1]], text)
    lines = (line for line in text.splitlines() if "{{" not in line)
    return [*filter(None, yaml.safe_load_all("\n".join(lines).replace("> 600", "> 300")))]


def test_policies_with_the_names_of_an_installation_are_as_declared(api: Registered) -> None:
    """The chart may rename the namespaces and the quota ConfigMap. An administrator may lower the bound on seconds."""
    for path in (OF_MUTATING, OF_VALIDATING):
        text = json.dumps(api.objects[path]).replace("vcuda-quota-ledgers", "ledgers")
        for form in ("kube-system, {},", '"kube-system", "{}",'):
            text = text.replace(form.format("vcuda-quota"), form.format("gpus"))
        api.objects[path] = json.loads(text.replace("vcuda-quota-node", "agents"))
    for manifest in policies_of_the_chart():
        api.objects[path_of(manifest)] = manifest
    assert api.found() == ""


def test_a_policy_that_leaves_out_another_namespace_is_reported(api: Registered) -> None:
    """The policy has the name of another namespace where it should have the namespace of the ledgers."""
    path = OF_POLICY.replace("ledgers", "allocations")
    text = json.dumps(api.objects[path]).replace("vcuda-quota-ledgers", "team-a")
    api.objects[path] = json.loads(text)
    assert "allocations.quota.vcuda.io differs from the manifests in matchConstraints" in api.found()


def test_the_declared_policies_are_those_of_the_manifests() -> None:
    """If this fails, run `make chart`."""
    assert policies.WRITTEN.read_text(encoding="utf-8") == policies.declared()


def test_ca_bundles_with_further_cas_are_as_declared(api: Registered) -> None:
    """During a rotation, one webhook may have a CA that another does not have yet."""
    ours, other = (make_authority(datetime.now(UTC)).certificate_pem() for _ in range(2))
    for bundle, webhook in zip((ours, other + ours, ours), api.objects[OF_VALIDATING]["webhooks"], strict=True):
        webhook["clientConfig"]["caBundle"] = base64.b64encode(bundle).decode()
    assert api.found() == ""


def test_a_ca_bundle_that_the_api_server_does_not_trust_is_reported(api: Registered) -> None:
    api.fault = Unavailable("failed calling webhook: x509: certificate signed by unknown authority")
    assert api.found().endswith("has a caBundle by which the API server does not trust the webhook's certificate")
    assert api.metric(VALIDATING, "vcuda-quota") == 1
    api.fault = None
    assert api.found() == ""


def test_a_right_that_the_controller_lacks_is_reported(api: Registered) -> None:
    def reject(_method: str, _timeout: float, _effect: object) -> bytes:
        raise Forbidden(403, "no right")

    api.deliver = reject
    assert "MutatingWebhookConfiguration 00-vcuda-quota cannot be read" in api.found()
    assert api.found().endswith(f"; and {len(DECLARED) - 3} more")


def test_a_missing_registration_is_checked_every_five_seconds_and_a_complete_one_every_minute(api: Registered) -> None:
    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            rounds.append((api.watch.text == "", timeout))
            changes.get(len(rounds), lambda: None)()
            return len(rounds) == 5

    rounds: list[tuple[bool, float | None]] = []
    changes: dict[int, Callable[[], object]] = {2: api.backup(), 4: lambda: api.remove(OF_POLICY)}
    api.remove(OF_MUTATING)
    api.watch.run(Stop())
    assert rounds == [(False, 5), (False, 5), (True, 60), (True, 60), (False, 5)]


def test_a_registration_that_cannot_be_read_does_not_end_the_watch(api: Registered) -> None:
    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            rounds.append(timeout)
            return len(rounds) > 1

    rounds: list[float | None] = []
    api.objects[OF_BINDING].pop("spec")
    api.watch.run(Stop())
    assert len(rounds) == 2


@cases(
    "applies, plugin",
    policies=("evaluates", "ValidatingAdmissionPolicy"),
    webhooks=("calls_webhook", "ValidatingAdmissionWebhook"),
)
def test_a_disabled_admission_plugin_is_reported(api: Registered, applies: str, plugin: str) -> None:
    setattr(api, applies, False)
    assert api.found().startswith(f"AdmissionPlugin {plugin} is disabled")
    assert api.metric("AdmissionPlugin", plugin) == 1
    setattr(api, applies, True)
    assert api.found() == ""
    assert api.metric("AdmissionPlugin", plugin) == 0


def test_disabled_policies_are_reported_while_the_webhook_does_not_answer(api: Registered) -> None:
    api.evaluates, api.fault = False, Unavailable("failed calling webhook")
    with pytest.raises(Unavailable):
        api.found()
    assert api.metric("AdmissionPlugin", "ValidatingAdmissionPolicy") == 1


def test_a_restored_object_is_not_reported_while_the_webhook_does_not_answer(api: Registered) -> None:
    restore = api.backup()
    api.remove(OF_POLICY)
    assert api.found()
    restore()
    api.fault = Unavailable("failed calling webhook")
    with pytest.raises(Unavailable):
        api.found()
    assert api.watch.text == ""


@cases("fault", another=Forbidden(403, "no right"), down=Unavailable("failed calling webhook"))
def test_only_the_answer_of_the_webhook_shows_that_it_is_called(api: Registered, fault: VcudaError) -> None:
    api.calls_webhook = False
    assert "ValidatingAdmissionWebhook is disabled" in api.found()
    api.fault = fault
    with pytest.raises(type(fault)):
        api.found()
    assert "ValidatingAdmissionWebhook is disabled" in api.watch.text


def test_a_probe_that_conflicts_was_admitted_without_the_webhook(api: Registered) -> None:
    api.fault = Conflict(409, "the ConfigMap already exists")
    assert "ValidatingAdmissionWebhook is disabled" in api.found()


def test_a_policy_that_the_api_server_applies_a_moment_later_is_not_reported(api: Registered) -> None:
    api.evaluates = False
    api.watch.check(lambda _: setattr(api, "evaluates", True))
    assert api.watch.text == ""


def test_exactly_the_policies_of_the_manifests_are_declared_and_may_be_read() -> None:
    stored = [*documents("policies.yaml"), *documents("usage-policy.yaml")]
    for kind in (POLICY, BINDING):
        assert sorted(each["metadata"]["name"] for each in stored if each["kind"] == kind) == sorted(POLICIES)
    rules = [rule for each in documents("controller-rbac.yaml") for rule in each.get("rules", ())]
    readable = {
        (resource, name)
        for rule in rules
        if rule["apiGroups"] == ["admissionregistration.k8s.io"]
        for resource in rule["resources"]
        for name in rule["resourceNames"]
    }
    assert readable >= {(RESOURCES[kind], name) for kind, name in DECLARED}
