"""What kube-scheduler sends an extender, as its Go types write it, and what it is answered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from controller.extender.protocol import (
    BindingArgs,
    ExtenderArgs,
    Victims,
    read_binding_args,
    read_extender_args,
    read_preemption_args,
    write_binding,
    write_preemption,
    write_priorities,
)
from tests.builders import vcuda_pod
from vcuda.allocations.cards import Unplaceable
from vcuda.errors import BadInput

NODES = [{"metadata": {"name": name, "labels": {"a": "b"}}, "status": {"x": 1}} for name in ("n1", "n2")]


def read(**fields: Any) -> ExtenderArgs:
    return read_extender_args(json.dumps(fields).encode())


def test_names_of_nodes_are_answered_with_names() -> None:
    args = read(Pod=vcuda_pod(), Nodes=None, NodeNames=["n1", "n2"])
    assert (args.pod.metadata.name, args.names) == ("train-0", ("n1", "n2"))
    answer = json.loads(args.passing(["n2"]))
    assert answer == {
        "NodeNames": ["n2"],
        "Nodes": None,
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": {},
        "Error": "",
    }


def test_nodes_are_answered_with_the_very_nodes() -> None:
    args = read(Pod=vcuda_pod(), Nodes={"metadata": {}, "items": NODES}, NodeNames=None)
    assert args.names == ("n1", "n2")
    answer = json.loads(args.passing(["n2"]))
    assert (answer["Nodes"]["items"], answer["NodeNames"]) == ([NODES[1]], None)


@pytest.mark.parametrize("fields", [{}, {"Nodes": None}, {"Nodes": {"items": None}}, {"NodeNames": []}])
def test_no_nodes_are_none(fields: dict[str, Any]) -> None:
    assert read(Pod=vcuda_pod(), **fields).names == ()


def test_every_reason_is_told_once_and_those_that_last_are_told_apart() -> None:
    reasons = {
        "n1": Unplaceable("no vcuda cards"),
        "n2": Unplaceable("1 whole vcuda cards needed, 0 free", final=False),
    }
    answer = json.loads(read(Pod=vcuda_pod(), NodeNames=["n1", "n2"]).failing(reasons))
    assert answer["NodeNames"] == []
    assert answer["FailedNodes"] == {"n2": "1 whole vcuda cards needed, 0 free"}
    assert answer["FailedAndUnresolvableNodes"] == {"n1": "no vcuda cards"}


def test_an_error_holds_no_percent_sign() -> None:
    answer = json.loads(read(Pod=vcuda_pod(), NodeNames=["n1"]).failed("at 100%"))
    assert (answer["Error"], answer["NodeNames"], answer["FailedNodes"]) == ("at 100 percent", [], {})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"Pod": 3}', b'{"Pod": {}, "NodeNames": "n1"}', b"\xff"])
def test_what_are_no_arguments_is_bad_input(body: bytes) -> None:
    with pytest.raises(BadInput, match="no ExtenderArgs"):
        read_extender_args(body)
    if b"NodeNames" not in body:
        with pytest.raises(BadInput, match="no ExtenderPreemptionArgs"):
            read_preemption_args(body)


@pytest.mark.parametrize(
    "field",
    [
        {"NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "a"}, {"UID": "b"}], "NumPDBViolations": 2}}},
        {
            "NodeNameToVictims": {
                "n1": {"Pods": [{"metadata": {"uid": "a"}}, {"metadata": {"uid": "b"}}], "NumPDBViolations": 2}
            },
            "NodeNameToMetaVictims": None,
        },
    ],
)
def test_victims_come_as_uids_or_as_pods_and_go_back_as_uids(field: dict[str, Any]) -> None:
    preemption = read_preemption_args(json.dumps({"Pod": vcuda_pod(), **field}).encode())
    assert preemption.victims == {"n1": Victims(("a", "b"), 2)}
    assert json.loads(write_preemption(preemption.victims)) == {
        "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "a"}, {"UID": "b"}], "NumPDBViolations": 2}}
    }


def test_no_victims_are_none() -> None:
    preemption = read_preemption_args(json.dumps({"Pod": vcuda_pod(), "NodeNameToMetaVictims": {"n1": {}}}).encode())
    assert preemption.victims == {"n1": Victims((), 0)}


def test_a_binding_names_the_pod_and_the_node() -> None:
    asked = {"PodName": "train", "PodNamespace": "team-a", "PodUID": "u1", "Node": "n1"}
    assert read_binding_args(json.dumps(asked).encode()) == BindingArgs("team-a", "train", "u1", "n1")


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"PodName": "a", "PodNamespace": "b", "PodUID": 3, "Node": ""}'])
def test_what_is_no_binding_is_bad_input(body: bytes) -> None:
    with pytest.raises(BadInput, match="no ExtenderBindingArgs"):
        read_binding_args(body)


def test_a_binding_is_answered_with_an_error_or_none() -> None:
    assert json.loads(write_binding("")) == {"Error": ""}
    assert json.loads(write_binding("at 100%")) == {"Error": "at 100 percent"}


def test_scores_are_a_list_of_hosts() -> None:
    assert json.loads(write_priorities({"n1": 0, "n2": 10})) == [
        {"Host": "n1", "Score": 0},
        {"Host": "n2", "Score": 10},
    ]
