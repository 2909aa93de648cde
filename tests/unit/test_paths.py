"""Tests that docs/architecture.md lists, in order, the modules that run for a new pod and for a recount."""

import asyncio
import base64
import configparser
import re
from pathlib import Path
from typing import Any

import jsonpatch
import msgspec
import structlog

from tests.api_double import ApiDouble
from tests.builders import LABELS, review, vcuda_pod
from tests.recounting import PENDING, Recounting
from tests.replicas import Replica
from tests.traced import modules_of
from vcuda.admission_review import AdmissionReview, ReviewDeadline
from vcuda.placement.nodes import Nodes
from vcuda.quota.model import Limit, NamespaceQuota, Quota
from webhook.admission import Gate, Service
from webhook.metrics import Metrics
from webhook.review.context import PolicySnapshot

ARCHITECTURE = Path(__file__).parents[2] / "docs/architecture.md"


def documented(heading: str) -> list[str]:
    section = ARCHITECTURE.read_text().partition(f"### {heading}\n")[2].partition("\n#")[0]
    return [path.replace("/", ".") for path in re.findall(r"^\d+\. `([\w/]+)\.py`", section, re.MULTILINE)]


def test_each_module_is_in_the_core_an_option_or_a_root_as_documented() -> None:
    read = configparser.ConfigParser()
    read.read(ARCHITECTURE.parents[1] / "setup.cfg")
    contract = read["importlinter:contract:core"]
    core, options = contract["source_modules"].split(), contract["forbidden_modules"].split()
    section = ARCHITECTURE.read_text().partition("## Core and options\n")[2].partition("\n## ")[0]
    listed, _, table = section.partition("|---")
    roots = re.findall(r"`(\w+/\w+)\.py`", listed)
    assert sorted(re.findall(r"`(\w+(?:/\w+)?)(?:\.py)?`", table.partition("\n\n")[0])) == sorted(
        option.replace(".", "/") for option in options
    )
    files = (each for part in ("vcuda", "webhook", "controller") for each in (ARCHITECTURE.parents[1] / part).iterdir())
    modules = {
        f"{each.parent.name}.{each.stem}"
        for each in files
        if not each.name.startswith("_") and each.suffix in ("", ".py")
    }
    assert sorted([*core, *options, *(path.replace("/", ".") for path in roots)]) == sorted({*modules, "certs"})


def create(service: Service, uid: str) -> None:
    def called(path: str, pod: dict[str, Any]) -> dict[str, Any]:
        body = msgspec.json.encode(AdmissionReview("admission.k8s.io/v1", "AdmissionReview", review(pod)))
        answer = asyncio.run(service.answer(path, body, ReviewDeadline.after(10)))
        response: dict[str, Any] = msgspec.json.decode(answer)["response"]
        return response

    sent = vcuda_pod()
    pinned = jsonpatch.apply_patch(sent, base64.b64decode(called("/mutate", sent)["patch"]))
    pod = {**pinned, "metadata": {**pinned["metadata"], "name": uid, "uid": uid}}
    assert called("/validate", pod)["allowed"]


def test_the_modules_of_a_create_are_documented_in_their_order(api: ApiDouble) -> None:
    """The documented list begins when the ledger exists. So the test first creates another pod."""
    policy = PolicySnapshot(
        Quota({"team-a": NamespaceQuota({"M40": Limit(400)})}, version="1"),
        Nodes.of({"node-1": {LABELS.model: "M40"}}, LABELS),
    )
    first, second = (
        Service(lambda: policy, Replica(api).ledgers, Metrics(), Gate(), structlog.get_logger()) for _ in range(2)
    )
    create(first, "first")
    assert modules_of(lambda: create(second, "second")) == documented("The modules of a create")


def test_the_modules_of_a_turn_of_the_recounter_are_documented_in_their_order(api: ApiDouble, replica: Replica) -> None:
    recounting = Recounting(api, replica, PENDING)
    assert modules_of(recounting.take_turn) == documented("The modules of a turn of the recounter")
