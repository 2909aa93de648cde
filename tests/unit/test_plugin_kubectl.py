"""Tests of the output of kubectl that `kubectl gpuquota` reads."""

import pytest

from controller.plugin.kubectl import Kubectl, PlainRejection, failure, in_path, split_warnings
from tests.gpuquota import run
from tests.tables import cases
from vcuda import errors


@cases(
    "told, kind, message",
    forbidden=(
        'Error from server (Forbidden): pods "a" is forbidden: exceeded quota: A100',
        errors.Forbidden,
        'pods "a" is forbidden: exceeded quota: A100 (HTTP 403)',
    ),
    not_found=('Error from server (NotFound): pods "a" not found', errors.NotFound, 'pods "a" not found (HTTP 404)'),
    several_lines=("Error from server (Forbidden): one\ntwo", errors.Forbidden, "one\ntwo (HTTP 403)"),
    without_a_reason=("Error from server: no", PlainRejection, "no"),
    of_a_new_reason=("Error from server (Newer): no", PlainRejection, "no"),
    invalid=(
        'The Pod "_x" is invalid: metadata.name: Invalid value: "_x": a lowercase',
        errors.ApiError,
        'The Pod "_x" is invalid: metadata.name: Invalid value: "_x": a lowercase (HTTP 422)',
    ),
    credentials=(
        "error: You must be logged in to the server (Unauthorized)",
        errors.ApiError,
        "You must be logged in to the server (Unauthorized) (HTTP 401)",
    ),
    later=("Error from server (TooManyRequests): retry", errors.Unavailable, "retry (TooManyRequests)"),
    broken=("Error from server (InternalError): oh", errors.Unavailable, "oh (InternalError)"),
    away=("Unable to connect to the server: EOF", errors.Unavailable, "Unable to connect to the server: EOF"),
    context=('error: context "x" does not exist', errors.BadInput, 'context "x" does not exist'),
    nothing=("", errors.Unavailable, "kubectl failed without a message"),
)
def test_the_text_of_kubectl_becomes_the_error_that_it_says(told: str, kind: type[Exception], message: str) -> None:
    error = failure(told)
    assert (type(error), str(error)) == (kind, message)


def test_warnings_are_not_a_part_of_an_error() -> None:
    told = "Warning: one: two\nError from server (Forbidden): no\nWarning: three\n"
    assert split_warnings(told) == (("one: two", "three"), "Error from server (Forbidden): no")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a%2Fb", "a?b", "a b"])
def test_a_name_that_would_lead_to_another_object_is_rejected(name: str) -> None:
    with pytest.raises(errors.BadInput, match="cannot be the name of an object"):
        in_path(name)
    assert in_path("train-0.a") == "train-0.a"


def test_without_kubectl_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(errors.BadInput):
        Kubectl.find()
    done = run("-n", "team-a")
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "Error: kubectl is not on PATH; kubectl gpuquota needs kubectl to reach the cluster\n"
