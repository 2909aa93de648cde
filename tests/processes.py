"""Runs the programs of vcuda quota as processes. Tests start them, wait for log lines, send requests, and stop them."""

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sysconfig
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.reviews import Json, patched, review_of, with_uid

SCRIPTS = Path(sysconfig.get_path("scripts"))
DOCKERFILE = Path(__file__).parents[1] / "Dockerfile"
MALLOC = dict(re.findall(r"\b(MALLOC_\w+)=(\d+)", DOCKERFILE.read_text()))
"""The settings of the C library's allocator in the image. The programs use as much memory here as in a container."""
PATIENCE = 60.0
"""The maximum seconds for which a test waits for something."""

JSON_TYPE = {"Content-Type": "application/json"}
Body = bytes | str | Iterable[bytes] | None
T = TypeVar("T")

Fields = dict[str, Any]
"""A structured line of a log, or another JSON object."""


def eventually(holds: Callable[[], T], told: Callable[[], object] = str, timeout: float = PATIENCE) -> T:
    """Return the result of ``holds`` once it is true. After a timeout, raise TimeoutError with the text of ``told``."""
    deadline = time.monotonic() + timeout
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {told()}")
        time.sleep(0.05)
    return found


class Reply(NamedTuple):
    """One HTTP answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def decoded(self) -> Fields:
        """Return the body, which must be a JSON object. The Content-Type must be application/json."""
        assert self.headers["Content-Type"] == "application/json", self
        answer: Fields = json.loads(self.body)
        return answer

    def samples(self, name: str, labels: Mapping[str, str]) -> list[float]:
        families = text_string_to_metric_families(self.body.decode())
        samples = [sample for family in families for sample in family.samples]
        return [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]


class Lines:
    """The lines that a stream has delivered so far. A separate thread reads them."""

    def __init__(self, stream: IO[str]) -> None:
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, args=(stream,))
        self._thread.start()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def so_far(self) -> list[str]:
        with self._changed:
            return list(self._lines)

    def first(self, wanted: Callable[[str], bool]) -> str | None:
        """Return the first wanted line as soon as it arrives, or None if the stream ended without such a line."""

        def found() -> str | None:
            return next(filter(wanted, self._lines), None)

        with self._changed:
            if not self._changed.wait_for(lambda: found() or self._ended, PATIENCE):
                raise TimeoutError(f"not the line wanted, {PATIENCE:g} s long: {self._lines}")
            return found()

    def join(self) -> None:
        self._thread.join(PATIENCE)


class OwnProcess:
    """A running program of vcuda quota.

    Its environment has ``env``, `MALLOC`, and all variables of the test except VCUDA_*.
    """

    def __init__(self, command: Sequence[str | Path], env: Mapping[str, str]) -> None:
        others = {name: value for name, value in os.environ.items() if not name.startswith("VCUDA_")}
        self.process = subprocess.Popen(
            [*map(str, command)],
            env={**others, **MALLOC, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # The program has its own process group, so that a test can kill the program together with its workers.
            start_new_session=True,
        )
        assert self.process.stdout
        assert self.process.stderr
        self._out, self._err = Lines(self.process.stdout), Lines(self.process.stderr)
        self._awaited = False
        try:
            self.await_start()
        except BaseException:
            self.kill()
            raise

    def await_start(self) -> None:
        """Return when the program is ready. If this method raises, the program is killed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        """End the program. Unless the test has ended it or has failed, the program must exit with 0 after SIGTERM."""
        try:
            if kind is None and not self._awaited:
                assert self.terminate() == 0, self.output()
        finally:
            self.kill()

    def await_log(self, event: str, wanted: Callable[[Fields], bool] = lambda _: True) -> Fields:
        """Wait for a structured log line of ``event`` that is wanted, and return it."""

        def fits(line: str) -> bool:
            return line.startswith("{") and (fields := json.loads(line))["event"] == event and wanted(fields)

        line = self._out.first(fits)
        if line is None:
            raise RuntimeError(f"ended with status {self.process.wait()}, never {event!r}:\n{self.output()}")
        found: Fields = json.loads(line)
        return found

    def logs(self, event: str | None = None) -> list[Fields]:
        """Return all structured log lines so far, or those of one event. They are complete after the program ended."""
        lines = (json.loads(line) for line in self._out.so_far() if not event or event in line)
        return [line for line in lines if event is None or line["event"] == event]

    def output(self) -> str:
        return "".join([*self._out.so_far(), *self._err.so_far()])

    def wait(self) -> int:
        """Return the exit status after the program has ended and all its output has arrived."""
        self._awaited = True
        status = self.process.wait(PATIENCE)
        self._out.join()
        self._err.join()
        return status

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> int:
        """Send SIGKILL to the program and its workers, if it still runs. Return the exit status."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.wait()


class Server(OwnProcess):
    """A program that answers HTTP."""

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection for the caller, who must close it."""
        raise NotImplementedError

    def send(self, method: str, path: str, body: Body = None, headers: Mapping[str, str] = JSON_TYPE) -> Reply:
        with closing(self.connect()) as connection:
            return exchange(connection, method, path, body, headers)

    def get(self, path: str) -> Reply:
        return self.send("GET", path)

    def samples(self, name: str, /, **labels: str) -> list[float]:
        return self.get("/metrics").samples(name, labels)

    def metric(self, name: str, /, **labels: str) -> float:
        return sum(self.samples(name, **labels))

    def await_metric(self, name: str, least: float, **labels: str) -> None:
        eventually(lambda: self.metric(name, **labels) >= least, lambda: f"{name} {labels}\n{self.output()}")

    def await_ready(self) -> None:
        eventually(lambda: self.get("/readyz").status == HTTPStatus.OK, self.output)


class StatusProcess(Server):
    """A running `vcuda-controller` with any of its commands. ``port``: the port of 127.0.0.1 with its metrics."""

    def __init__(
        self, command: str, *flags: str | Path, program: Sequence[str | Path] = (SCRIPTS / "vcuda-controller",)
    ) -> None:
        super().__init__((*program, command, *flags), {})

    def await_start(self) -> None:
        self.port: int = self.await_log("serving status")["port"]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)


class ControllerProcess(StatusProcess):
    """A running controller, which may become the leader. It logs when it leads."""

    def __init__(self, *flags: str | Path, program: Sequence[str | Path] = (SCRIPTS / "vcuda-controller",)) -> None:
        super().__init__("run", *flags, program=program)

    def await_synced(self) -> None:
        """Return when the controller leads and has listed everything."""
        self.await_log("this replica leads now")
        self.await_log("every watch has received its first list")


class NodeProcess(StatusProcess):
    """A running node agent."""

    def __init__(self, *flags: str | Path) -> None:
        super().__init__("node", *flags)

    def await_sweeps(self, count: int, result: str = "complete") -> None:
        """Return after ``count`` more sweeps (runs over all directories) with this result."""
        so_far = self.metric("vcuda_vm_sweeps_total", result=result)
        self.await_metric("vcuda_vm_sweeps_total", so_far + count, result=result)

    def await_deleted(self, name: str) -> None:
        self.await_log("deleted", lambda line: line["directory"] == name)


class WebhookProcess(Server):
    """A running webhook. ``ca``: the CA file for its certificate; None if the webhook makes its own certificate."""

    def __init__(
        self,
        flags: Iterable[str | Path],
        ca: Path | None,
        env: Mapping[str, str],
        command: Sequence[str | Path] = (SCRIPTS / "vcuda-webhook", "serve"),
    ) -> None:
        defaults = {"VCUDA_BIND": "127.0.0.1:0", "VCUDA_DRAIN_SECONDS": "0"}
        self._ca = ca
        super().__init__((*command, *flags), {**defaults, **env})

    def await_start(self) -> None:
        self.url: str = self.await_log("listening")["url"]
        made = self._ca or self.await_log("certificate made for this run")["ca"]
        self.tls = ssl.create_default_context(cafile=made)

    def connect(self) -> http.client.HTTPSConnection:
        host = urllib.parse.urlsplit(self.url).netloc
        return http.client.HTTPSConnection(host, context=self.tls, timeout=PATIENCE)

    def review(self, path: str, subject: object, **fields: object) -> Json:
        """Send a review of the creation of ``subject``. Check the form of the answer, and return the response in it."""
        asked = review_of(subject, **fields)
        reply = self.send("POST", path, json.dumps(asked))
        assert reply.status == HTTPStatus.OK, reply
        answer = reply.decoded()
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        response: Json = answer["response"]
        assert response["uid"] == asked["request"]["uid"]
        return response

    def admit(self, pod: Json, **fields: object) -> Json:
        """Send a pod through /mutate and /validate as the API server does, and return the last response."""
        response = self.review("/mutate", pod, **fields)
        if not response["allowed"]:
            return response
        return self.review("/validate", with_uid(patched(pod, response)), **fields)

    def worker(self) -> int:
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


def memory(pid: int, field: str = "VmHWM", file: str = "status") -> int:
    """Return a process's memory in MiB, from a file in /proc/PID. VmHWM is the peak, VmRSS the current memory."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE)
    if not found:
        raise ProcessLookupError(pid)
    return int(found[1]) // 1024


def serving(*flags: str | Path, ca: Path | None = None, env: Mapping[str, str] | None = None) -> WebhookProcess:
    """Run `vcuda-webhook serve` on a free port during the ``with`` statement. ``env``: more environment variables."""
    return WebhookProcess(flags, ca, env or {})


def exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Body = None,
    headers: Mapping[str, str] = JSON_TYPE,
) -> Reply:
    """Make one request on a connection that stays open. An iterable body is sent in chunks."""
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    return Reply(response.status, response.headers, response.read())
