"""Tests of the check of the API server's version: versions that are too old, and versions that cannot be parsed."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from vcuda.errors import ApiError, Conflict, Unavailable, UnsupportedVersion
from vcuda.kube import VersionCheck
from vcuda.kube.connection import check_version

SERVER = "https://10.0.0.1:6443"


def check(told: object) -> str:
    return check_version(json.dumps(told).encode(), SERVER)


def info(git: str, major: str = "", minor: str = "") -> dict[str, str]:
    return {"gitVersion": git, "major": major, "minor": minor, "platform": "linux/amd64"}


@pytest.mark.parametrize(
    "told",
    [
        info("v1.30.0", "1", "30"),
        *map(info, ("v1.30.0-rc.1", "v1.32.1+k3s1", "1.33.0", "v1.100.0", "v2.0.0")),
        info("v1.30.4-gke.123", "1", "30+"),
        info("v1.31.2-eks-7f9249a", "1", "31+"),
        info("our own build", "1", "30+"),
        info("v0.0.0-master+$Format:%H$", "1", "36"),
    ],
    ids=lambda told: told["gitVersion"],
)
def test_the_oldest_supported_version_and_newer_ones_log_no_warning(told: Any) -> None:
    assert check(told) == ""


@pytest.mark.parametrize(
    ("told", "named"),
    [
        (info("v1.29.4", "1", "29"), "v1.29.4"),
        (info("v1.29.99-gke.1", "1", "29+"), "v1.29.99-gke.1"),
        (info("v1.9.0"), "v1.9.0"),
        (info("v1.3"), "v1.3"),
        (info("our own build", "1", "29+"), "v1.29+"),
    ],
)
def test_an_older_version_is_rejected_in_one_message_with_both_versions(told: Any, named: str) -> None:
    with pytest.raises(UnsupportedVersion) as rejected:
        check(told)
    assert str(rejected.value) == (
        f"Kubernetes {named} at {SERVER} is older than v1.30, the oldest supported version. Upgrade the cluster first."
    )


@pytest.mark.parametrize(
    "told",
    [
        {},
        *map(info, ("", "v0.0.0-master+$Format:%H$", "our own build", "v1", "v1.x", "v99999999999.1")),
        info("v１.２９"),  # noqa: RUF001  # full-width digits
        info("", "one", "29"),
        {"message": "no JSON"},
        {"gitVersion": None, "major": 1, "minor": None},
        *(b"", b"<html>", b"[]", b"\xff", b'{"gitVersion": 1}'),
    ],
    ids=str,
)
def test_an_unknown_version_logs_a_warning_and_stops_nothing(told: Any) -> None:
    warning = check_version(told, SERVER) if isinstance(told, bytes) else check(told)
    assert f"the version of Kubernetes at {SERVER} is not known" in warning
    assert "the oldest supported version is v1.30" in warning


class Told:
    """Runs the check of the API server's version, and records its warnings and errors."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.errors: list[str] = []
        self.check = VersionCheck(self.warnings.append, self.errors.append)


def raising(error: Exception) -> Callable[[], bytes]:
    def read() -> bytes:
        raise error

    return read


def test_a_supported_version_passes_without_a_message() -> None:
    told = Told()
    told.check.make(lambda: b'{"gitVersion": "v1.30.0"}', SERVER)
    assert (told.check.passed, told.warnings, told.errors) == (True, [], [])


@pytest.mark.parametrize("error", [ApiError(403, "forbidden"), ApiError(404, "not found"), Conflict(409, "odd")])
def test_a_cluster_that_forbids_reading_its_version_logs_a_warning_and_continues(error: ApiError) -> None:
    told = Told()
    told.check.make(raising(error), SERVER)
    assert told.check.passed
    assert [str(error) in warning for warning in told.warnings] == [True]


@pytest.mark.parametrize("error", [Unavailable("connection refused"), ApiError(401, "Unauthorized")])
def test_the_check_is_repeated_if_there_was_no_answer(error: Exception) -> None:
    told = Told()
    with pytest.raises(type(error)):
        told.check.make(raising(error), SERVER)
    assert (told.check.passed, told.warnings, told.errors) == (False, [], [])


def test_an_old_version_ends_the_process_and_the_request_is_not_sent() -> None:
    told = Told()
    with pytest.raises(UnsupportedVersion):
        told.check.make(lambda: b'{"gitVersion": "v1.29.4"}', SERVER)
    assert ["v1.29.4" in error for error in told.errors] == [True]
    assert not told.check.passed
