"""Creates pods and opens connections to the webhook continuously, for tests in which none of them may fail."""

import base64
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

from tests.e2e.cluster import Cluster, Json
from tests.integration.reviews import card_pod, gpu_pod
from tests.processes import eventually

PODS_PER_SECOND = 20
CARDS_EVERY = 20
"""One of every `CARDS_EVERY` pods requests a card and is charged. The webhook is also called for the other pods.

The charges stay pending, because no controller runs. A namespace may have 512 pending charges, which is enough for
eight minutes.
"""


@dataclass
class Outcomes:
    """How many operations have succeeded so far, and the error of each operation that has failed."""

    succeeded: int = 0
    failures: list[str] = field(default_factory=list)

    def await_more(self, number: int) -> None:
        goal = self.succeeded + number
        eventually(lambda: self.succeeded >= goal or self.failures)
        assert self.failures == []


def share(number: int, namespace: str) -> Json:
    return gpu_pod(f"load-{number}", namespace, {"tencent.com/vcuda-core": "1", "tencent.com/vcuda-memory": "1"})


@contextmanager
def creating(
    cluster: Cluster, namespace: str, make: Callable[[int, str], Json] | None = None, pace: float = PODS_PER_SECOND
) -> Iterator[Outcomes]:
    """Create ``pace`` pods per second in ``namespace`` during the ``with`` statement. No create is retried.

    At most four creates run at a time, so a slow machine may create fewer pods.

    ``make``: returns the manifest of a pod for its number and namespace; by default `some_with_cards`.
    """
    creates, lock = Outcomes(), threading.Lock()
    numbers = count()
    started = time.monotonic()

    def create(stop: threading.Event) -> None:
        while not stop.is_set():
            with lock:
                number = next(numbers)
            if stop.wait(max(0.0, started + number / pace - time.monotonic())):
                return
            answer = cluster.try_create((make or some_with_cards)(number, namespace))
            with lock:
                if answer.message:
                    creates.failures.append(f"{answer.status} {answer.message}")
                else:
                    creates.succeeded += 1

    with in_threads([create] * 4):
        yield creates


def some_with_cards(number: int, namespace: str) -> Json:
    return card_pod(f"card-{number}", namespace) if number % CARDS_EVERY == 0 else plain(number, namespace)


def plain(number: int, namespace: str) -> Json:
    return gpu_pod(f"plain-{number}", namespace, {})


@contextmanager
def connecting(cluster: Cluster, path: str, addresses: Callable[[], Sequence[str]], name: str) -> Iterator[Outcomes]:
    """Connect to every address again and again during the ``with`` statement, with ``name`` as expected server name.

    The connections trust the caBundles of the webhook configuration at ``path``. The API server reuses its connections,
    so only new connections show that every caBundle and certificate match.
    """
    handshakes = Outcomes()

    def connect(stop: threading.Event) -> None:
        while not stop.wait(0.05):
            bundles = {hook["clientConfig"].get("caBundle", "") for hook in ours(cluster.rest.get(path), name)}
            for bundle in bundles:
                for address in addresses():
                    try:
                        shake(address, base64.b64decode(bundle), name)
                        handshakes.succeeded += 1
                    except (OSError, ValueError) as error:
                        handshakes.failures.append(f"{address}: {error}")

    with in_threads([connect]):
        yield handshakes


def ours(configuration: Json, name: str) -> list[Json]:
    """Return the webhooks of the configuration whose Service has the DNS name ``name`` (NAME.NAMESPACE.svc)."""
    services = [(hook, hook["clientConfig"].get("service", {})) for hook in configuration["webhooks"]]
    return [hook for hook, service in services if f"{service.get('name')}.{service.get('namespace')}.svc" == name]


def shake(address: str, bundle: bytes, name: str) -> bytes:
    """Connect to the server at ``address`` by TLS, and return its leaf certificate (DER).

    Raises OSError if no CA in ``bundle`` issued the certificate.
    """
    context = ssl.create_default_context(cadata=bundle.decode())
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), 10) as plain_socket,
        context.wrap_socket(plain_socket, server_hostname=name) as connection,
    ):
        return connection.getpeercert(binary_form=True) or b""


@contextmanager
def in_threads(works: Sequence[Callable[[threading.Event], None]]) -> Iterator[None]:
    """Run each function in its own thread during the ``with`` statement.

    Then set the event that makes them return, and raise the error of a function that has failed.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(len(works)) as threads:
        running = [threads.submit(work, stop) for work in works]
        try:
            yield
        finally:
            stop.set()
        for each in running:
            each.result()
