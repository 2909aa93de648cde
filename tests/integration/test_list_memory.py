"""Tests that our programs read a LIST of large objects, which tenants can create, in little memory."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kmock
import pytest

from controller.retry.rejected import MAX_OWNER_BYTES
from controller.seen_events import CLAIM_REASON
from examples.claims import NVIDIA, claim, entry
from tests.builders import ONE_CARD, stored_pod
from tests.integration.list_reader import READERS
from tests.integration.scripted import Script, serving, stream, write_kubeconfig
from vcuda.quota.rejections import OVER_QUOTA

pytestmark = pytest.mark.slow

pytestmark = pytest.mark.slow

OBJECTS = 80
LARGE = "x" * 1_200_000
REJECTED = f"{OVER_QUOTA}: M40 in namespace team-a"
MAX_MIB = 48
"""The maximum memory of a reader in MiB.

It is the sum of two pages of 8 MiB, the decoded objects of one page, and the memory that Python keeps for each page.
"""

EXPECTED = {"Events of rejected pods": 1, "rejected workloads": MAX_OWNER_BYTES // len(LARGE)}
"""The number of objects that a reader keeps of its LIST, for readers that do not keep all objects."""

CEL = [f'"{number}" != "{"x" * 10_000}"' for number in range(30)]
LARGE_CLAIM = [entry(NVIDIA, *CEL)] * 4
ANNOTATED = {"annotations": {"note": LARGE}}

SAMPLES: dict[str, dict[str, Any]] = {
    "pods": {**stored_pod(ONE_CARD), "metadata": ANNOTATED},
    "resourceclaims": claim(*LARGE_CLAIM),
    "events": {
        "metadata": {},
        "involvedObject": {"kind": "Pod", "name": "train", "uid": "1"},
        "reason": CLAIM_REASON,
        "message": f"{REJECTED} {LARGE}",
    },
    "replicasets": {
        "metadata": {},
        "spec": {"replicas": 2, "template": {"metadata": ANNOTATED, "spec": {"containers": []}}},
        "status": {"conditions": [{"type": "ReplicaFailure", "status": "True", "message": REJECTED}]},
    },
}


REST = {
    kind: json.dumps({field: value for field, value in sample.items() if field != "metadata"})[1:].encode()
    for kind, sample in SAMPLES.items()
}
"""The JSON of an object without its metadata, by kind. It is made only once, because it is large."""


class Lists(Script):
    """Answers each LIST in pages of large objects. LISTs of kinds without an entry in `SAMPLES` are empty."""

    def __call__(self, request: kmock.Request) -> kmock.Payload:
        kind = str(request.url.path).rpartition("/")[2]
        begin, objects = int(request.params.get("continue", 0)), OBJECTS if kind in SAMPLES else 0
        end = min(begin + int(request.params["limit"]), objects)
        head = {"resourceVersion": "7", "continue": str(end) if end < objects else ""}
        return stream(*_list(head, kind, range(begin, end))).render()


def _list(head: dict[str, str], kind: str, numbers: range) -> Iterator[bytes]:
    yield b'{"metadata":%s,"items":[' % json.dumps(head).encode()
    for number in numbers:
        name = f"large-{number}"
        named = {"name": name, "namespace": f"team-{number}", "uid": f"{number}", "resourceVersion": "7"}
        metadata = json.dumps({**named, **SAMPLES[kind]["metadata"]}).encode()
        yield b"," * (number > numbers[0]) + b'{"metadata":%s,%s' % (metadata, REST[kind])
    yield b"]}"


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with serving(Lists()) as url:
        path = tmp_path_factory.mktemp("lists") / "kubeconfig"
        write_kubeconfig(path, url, {"token": "t"})
        yield path


@pytest.mark.parametrize("what", READERS)
def test_a_list_of_large_objects_takes_little_memory(kubeconfig: Path, what: str) -> None:
    command = [sys.executable, "-m", "tests.integration.list_reader", str(kubeconfig), what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    grown, read = map(int, done.stdout.splitlines()[-1].split())
    assert read == EXPECTED.get(what, OBJECTS)
    assert grown <= MAX_MIB
