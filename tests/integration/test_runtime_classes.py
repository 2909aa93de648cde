"""Tests of how the webhook judges a RuntimeClass: by name and handler, or only by name if it cannot list them."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import kmock
import pytest

from tests.builders import container, pod
from tests.e2e.installation import make_certificates
from tests.integration.scripted import Answer, Script, page, serving as serving_api, status, write_kubeconfig
from tests.processes import WebhookProcess, serving
from tests.rendered import Json

pytestmark = pytest.mark.slow

CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
QUOTA: Json = {
    "metadata": {"namespace": "kube-system", "name": "gpuquota", "uid": "q-1", "resourceVersion": "5"},
    "data": {"gpu_quota": "team-a: {quota: {M40: 8}}"},
}
FAST: Json = {"metadata": {"name": "fast", "uid": "r-1", "resourceVersion": "6"}, "handler": "nvidia"}


class Cluster(Script):
    """A double of an API server 1.30 without nodes. ``classes``: its answer to a LIST of RuntimeClasses."""

    def __init__(self, classes: Answer) -> None:
        super().__init__()
        self._answers = {
            "/version": Answer({"major": "1", "minor": "30", "gitVersion": "v1.30.4"}),
            "/api/v1/namespaces/kube-system/configmaps": page(9, QUOTA),
            "/api/v1/namespaces/vcuda-quota/configmaps": page(9),
            "/api/v1/nodes": page(9),
            CLASSES: classes,
        }

    def __call__(self, request: kmock.Request) -> kmock.Payload:
        path = request.url.path
        if "watch" in request.params and path in self._answers:
            return super().__call__(request)
        return self._answers.get(path, status(404, "the server could not find the requested resource")).render()


@contextmanager
def webhook(directory: Path, cluster: Cluster) -> Iterator[WebhookProcess]:
    make_certificates(directory / "certs")
    with serving_api(cluster) as url:
        write_kubeconfig(directory / "kubeconfig", url, {"token": "t"})
        flags = ("--cert-dir", directory / "certs", "--kubeconfig", directory / "kubeconfig")
        with serving(*flags, ca=directory / "certs" / "ca.crt") as process:
            process.await_ready()
            yield process


def answer(process: WebhookProcess, runtime_class: str) -> int:
    asked = pod(container(), runtimeClassName=runtime_class, metadata={"namespace": "team-a"})
    response = process.review("/validate", asked)
    status: int = HTTPStatus.OK if response["allowed"] else response["status"]["code"]
    return status


def test_a_class_of_any_name_is_judged_by_its_handler(tmp_path: Path) -> None:
    with webhook(tmp_path, Cluster(page(9, FAST))) as process:
        process.await_log("listed", lambda line: line["resource"] == CLASSES)
        assert answer(process, "fast") == HTTPStatus.UNPROCESSABLE_ENTITY
        assert answer(process, "slow") == HTTPStatus.OK


@pytest.mark.parametrize("code", [403, 503])
def test_the_webhook_serves_and_judges_by_names_while_it_cannot_list_runtime_classes(tmp_path: Path, code: int) -> None:
    message = 'runtimeclasses.node.k8s.io is forbidden: User "webhook" cannot list resource'
    with webhook(tmp_path, Cluster(status(code, message))) as process:
        failed = process.await_log("watch failed", lambda line: line["resource"] == CLASSES)
        assert message in failed["error"]
        assert process.get("/readyz").status == HTTPStatus.OK
        assert answer(process, "nvidia-cdi") == HTTPStatus.UNPROCESSABLE_ENTITY
        assert answer(process, "fast") == HTTPStatus.OK
