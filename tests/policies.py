"""Evaluates the ValidatingAdmissionPolicies of the base with a CEL implementation in Python."""

import functools
from collections.abc import Callable, Collection
from typing import Any

import celpy
from celpy import celtypes
from celpy.adapter import json_to_cel

from tests.guarded import GUARDED_ANNOTATIONS
from tests.rendered import BASE, Json, rendered
from vcuda.requests.bypasses import COMPUTE_POLICY, KAI
from vcuda.requests.schemes import SCHEMES

ANNOTATIONS = sorted(
    GUARDED_ANNOTATIONS
    | {*KAI, "GPU-Fraction", "Gpu-Memory", f"nvidia.com{COMPUTE_POLICY}", f"acme.com{COMPUTE_POLICY}"}
)
"""The annotations of pods that tenants may not change."""
LABELS = sorted({name for scheme in SCHEMES for name in scheme.allocation_labels})
"""The labels of pods that tenants may not change."""
POD = {"apiVersion": "v1", "kind": "Pod", "name": "train", "uid": "u1", "controller": True}
"""The reference to a pod that owns an object and is its controller."""

KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")


Function = Callable[..., celtypes.Value]
ENVIRONMENT = celpy.Environment()


@functools.cache
def compiled(expression: str) -> Any:
    return ENVIRONMENT.compile(expression)


@functools.cache
def policies() -> dict[str, Json]:
    return {each["metadata"]["name"]: each["spec"] for each in rendered(BASE) if each["kind"] == KINDS[0]}


def asking(rights: Collection[str]) -> dict[str, Any]:
    """Define CEL's `authorizer`: its calls build a text such as ``patch nodes``, and look it up in the given rights."""

    def add(before: str) -> Function:
        return lambda asked, name: celtypes.StringType(f"{asked}{before}{name}" if name else asked)

    def check(asked: celtypes.StringType, verb: celtypes.StringType) -> celtypes.Value:
        return celtypes.StringType(f"{verb} {asked}")

    return {
        "group": add(""),
        "resource": add(""),
        "subresource": add("/"),
        "namespace": add(" in "),
        "check": check,
        "allowed": lambda asked: celtypes.BoolType(str(asked) in rights),
    }


class Evaluation:
    """Evaluates the CEL expressions of a policy for one request. Raises CELEvalError if an evaluation fails."""

    def __init__(
        self,
        found: Json | None,
        old: Json | None,
        rights: Collection[str] = (),
        *,
        space: Json | None = None,
        **request: object,
    ) -> None:
        operation = "DELETE" if found is None else "UPDATE" if old else "CREATE"
        request = {"operation": operation, **request}
        given = {"object": found, "oldObject": old, "request": request, "authorizer": "", "namespaceObject": space}
        self.known = {key: json_to_cel(value) for key, value in given.items()}
        self.variables = self.known["variables"] = celtypes.MapType()
        self.functions = asking(rights)

    def evaluate(self, expression: str) -> celtypes.Value:
        return ENVIRONMENT.program(compiled(expression), functions=self.functions).evaluate(self.known)

    def meets_conditions(self, spec: Json) -> bool:
        return all(self.evaluate(each["expression"]) for each in spec.get("matchConditions", []))


def admits(name: str, found: Json | None, old: Json | None, rights: Collection[str] = (), **given: Any) -> bool:
    spec, asked = policies()[name], Evaluation(found, old, rights, **given)
    if not asked.meets_conditions(spec):
        return True
    for each in spec.get("variables", []):
        asked.variables[celtypes.StringType(each["name"])] = asked.evaluate(each["expression"])
    return all(asked.evaluate(each["expression"]) for each in spec["validations"])
