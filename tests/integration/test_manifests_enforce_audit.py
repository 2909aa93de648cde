"""What the component that has pods evicted adds to the base: two flags and one right."""

from __future__ import annotations

from pathlib import Path

from tests.rendered import BASE, Json, composed, label, one, rendered


def without_flags(controller: Json) -> Json:
    """The Deployment with the flags of its container taken out."""
    del controller["spec"]["template"]["spec"]["containers"][0]["args"]
    return controller


def flags(controller: Json) -> list[str]:
    """The arguments of its container."""
    args: list[str] = controller["spec"]["template"]["spec"]["containers"][0]["args"]
    return args


def test_evictions_are_a_choice_two_flags_and_one_right(tmp_path: Path) -> None:
    base, chosen = rendered(BASE), rendered(composed(tmp_path, ["enforce-audit"]))
    added = [each for each in chosen if label(each) not in set(map(label, base))]
    assert sorted(map(label, added)) == [
        "ClusterRole/vcuda-enforce-audit",
        "ClusterRoleBinding/vcuda-enforce-audit",
    ]
    role = one(added, "ClusterRole", "vcuda-enforce-audit")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods/eviction"], "verbs": ["create"]}]
    before, after = (one(objects, "Deployment", "vcuda-controller") for objects in (base, chosen))
    assert flags(after) == [*flags(before), "--enforce-audit", "--audit-period=600"]
    assert without_flags(after) == without_flags(before)


def test_the_base_evicts_nobody_and_has_no_right_to() -> None:
    base = rendered(BASE)
    assert "--enforce-audit" not in flags(one(base, "Deployment", "vcuda-controller"))
    rules = [rule for each in base for rule in each.get("rules", []) if "resources" in rule]
    assert not any("pods/eviction" in rule["resources"] or "*" in rule["resources"] for rule in rules)
