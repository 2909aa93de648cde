"""Tests of kube-scheduler's requests to an extender, as its Go types encode them, and of the answers."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from controller.extender import protocol
from tests.builders import vcuda_pod
from tests.tables import cases
from vcuda.allocations.cards import Unplaceable
from vcuda.errors import BadInput

NODES = [{"metadata": {"name": name, "labels": {"a": "b"}}, "status": {"x": 1}} for name in ("n1", "n2")]


def read(**fields: Any) -> protocol.ExtenderArgs:
    return protocol.read_extender_args(json.dumps(fields).encode())


def test_names_of_nodes_are_answered_with_names() -> None:
    args = read(Pod=vcuda_pod(), Nodes=None, NodeNames=["n1", "n2"])
    assert (args.pod.metadata.name, args.names) == ("train-0", ("n1", "n2"))
    nothing: dict[str, Any] = {"Nodes": None, "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": ""}
    assert json.loads(args.passing(["n2"])) == {**nothing, "NodeNames": ["n2"]}
    # kube-scheduler uses the error as a Go format string, so the answer must not contain a percent sign.
    assert json.loads(args.failed("at 100%")) == {**nothing, "NodeNames": [], "Error": "at 100 percent"}


def test_nodes_are_answered_with_the_same_nodes() -> None:
    args = read(Pod=vcuda_pod(), Nodes={"metadata": {}, "items": NODES}, NodeNames=None)
    assert args.names == ("n1", "n2")
    answer = json.loads(args.passing(["n2"]))
    assert (answer["Nodes"]["items"], answer["NodeNames"]) == ([NODES[1]], None)


@pytest.mark.parametrize("fields", [{}, {"Nodes": None}, {"Nodes": {"items": None}}, {"NodeNames": []}])
def test_a_request_without_nodes_names_none(fields: dict[str, Any]) -> None:
    assert read(Pod=vcuda_pod(), **fields).names == ()


def test_every_reason_is_listed_once_and_permanent_ones_are_separate() -> None:
    reasons = {
        "n1": Unplaceable("the node has no vcuda cards"),
        "n2": Unplaceable("1 card needed, 0 free", final=False),
    }
    answer = json.loads(read(Pod=vcuda_pod(), NodeNames=["n1", "n2"]).failing(reasons))
    assert (answer["NodeNames"], answer["FailedNodes"]) == ([], {"n2": "1 card needed, 0 free"})
    assert answer["FailedAndUnresolvableNodes"] == {"n1": "the node has no vcuda cards"}


BODIES = (b"", b"{", b"[]", b"{}", b'{"Pod": 3}', b"\xff")


@pytest.mark.parametrize(
    ("read_args", "wanted", "body"),
    [
        *((protocol.read_extender_args, "ExtenderArgs", body) for body in (*BODIES, b'{"Pod": {}, "NodeNames": "n1"}')),
        *((protocol.read_preemption_args, "ExtenderPreemptionArgs", body) for body in BODIES),
        *((protocol.read_binding_args, "ExtenderBindingArgs", body) for body in BODIES),
        (
            protocol.read_binding_args,
            "ExtenderBindingArgs",
            b'{"PodName": "a", "PodNamespace": "b", "PodUID": 3, "Node": ""}',
        ),
    ],
)
def test_invalid_arguments_are_bad_input(read_args: Callable[[bytes], object], wanted: str, body: bytes) -> None:
    with pytest.raises(BadInput, match=f"the body must be {wanted} in JSON"):
        read_args(body)


META_VICTIMS = {"NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "a"}, {"UID": "b"}], "NumPDBViolations": 2}}}
PODS = {"Pods": [{"metadata": {"uid": "a"}}, {"metadata": {"uid": "b"}}], "NumPDBViolations": 2}


@pytest.mark.parametrize(
    ("field", "victims"),
    [
        (META_VICTIMS, protocol.Victims(("a", "b"), 2)),
        ({"NodeNameToVictims": {"n1": PODS}, "NodeNameToMetaVictims": None}, protocol.Victims(("a", "b"), 2)),
        ({"NodeNameToMetaVictims": {"n1": {}}}, protocol.Victims((), 0)),
    ],
)
def test_victims_may_be_uids_or_pods(field: dict[str, Any], victims: protocol.Victims) -> None:
    preemption = protocol.read_preemption_args(json.dumps({"Pod": vcuda_pod(), **field}).encode())
    assert preemption.victims == {"n1": victims}


def test_a_binding_names_the_pod_and_the_node() -> None:
    asked = {"PodName": "train", "PodNamespace": "team-a", "PodUID": "u1", "Node": "n1"}
    assert protocol.read_binding_args(json.dumps(asked).encode()) == protocol.BindingArgs("team-a", "train", "u1", "n1")


@cases(
    "written, wanted",
    bound=(protocol.write_binding(""), {"Error": ""}),
    not_bound=(protocol.write_binding("at 100%"), {"Error": "at 100 percent"}),
    victims_as_uids=(protocol.write_preemption({"n1": protocol.Victims(("a", "b"), 2)}), META_VICTIMS),
    scores=(protocol.write_priorities({"n1": 0}), [{"Host": "n1", "Score": 0}]),
)
def test_an_answer_has_the_form_that_the_scheduler_reads(written: bytes, wanted: object) -> None:
    assert json.loads(written) == wanted
