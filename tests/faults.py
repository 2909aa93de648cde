"""Runs ``kubectl gpuquota doctor`` with a test double of an installation that has a fault."""

import json
from collections.abc import Callable

from tests.gpuquota import run
from tests.installed import Installed

JOB = "kubectl -n vcuda-quota create job --from=cronjob/vcuda-certs certs-now"


def findings(status: int) -> list[dict[str, str]]:
    told = run("doctor", "-o", "json")
    assert (told.exit_code, told.stderr) == (status, "")
    return list[dict[str, str]](json.loads(told.stdout))


def expect_fault(check: str, text: str, action: str) -> None:
    """Check that the command finds exactly one fault. ``text``, ``action``: parts of what it must say about it."""
    [found] = [each for each in findings(1) if each["state"] == "wrong"]
    assert (found["check"], text in found["text"], action in found["action"]) == (check, True, True), found
    [line] = [line for line in run("doctor").stdout.splitlines() if line.split()[:2] == [check, "wrong"]]
    assert line.endswith(f" Do this: {found['action']}")


def removed(path: str) -> Callable[[Installed], None]:
    return lambda api: api.remove(path)
