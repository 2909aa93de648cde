"""``vcuda-webhook serve`` as a process of its own: started, asked over TLS as the API server asks, and stopped."""

from __future__ import annotations

import http.client
import json
import os
import signal
import ssl
import subprocess
import sysconfig
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.integration.reviews import Json, patched, review_of, with_uid

PROGRAM = Path(sysconfig.get_path("scripts"), "vcuda-webhook")
JSON_TYPE = {"Content-Type": "application/json"}

PATIENCE = 60.0
"""Seconds until a wait for something that should have come becomes an error."""

Body = bytes | str | Iterable[bytes] | None


class Reply(NamedTuple):
    """One HTTP answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def decoded(self) -> Json:
        """The body, which is a JSON object and says so."""
        assert self.headers["Content-Type"] == "application/json", self
        answer: Json = json.loads(self.body)
        return answer


class Lines:
    """What a stream has brought so far, line by line, read by a thread of its own."""

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
        """The lines read until now."""
        with self._changed:
            return list(self._lines)

    def first(self, wanted: Callable[[str], bool]) -> str | None:
        """Return the first line wanted as soon as it is there; None where the stream ended without it."""

        def found() -> str | None:
            return next(filter(wanted, self._lines), None)

        with self._changed:
            if not self._changed.wait_for(lambda: found() or self._ended, PATIENCE):
                raise TimeoutError(f"not the line wanted, {PATIENCE:g} s long: {self._lines}")
            return found()

    def join(self) -> None:
        """Wait for the end of the stream."""
        self._thread.join(PATIENCE)


class WebhookProcess:
    """A running server. ``ca`` is the file that signs its certificate; without it, that of the run is taken."""

    def __init__(self, flags: Iterable[str | Path], ca: Path | None, env: Mapping[str, str]) -> None:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("VCUDA_")}
        self.process = subprocess.Popen(
            [PROGRAM, "serve", *map(str, flags)],
            env={**ours, "VCUDA_BIND": "127.0.0.1:0", "VCUDA_DRAIN_SECONDS": "0", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group to kill as a whole, worker included
        )
        assert self.process.stdout
        assert self.process.stderr
        self._out, self._err = Lines(self.process.stdout), Lines(self.process.stderr)
        try:
            self.url: str = self.await_log("listening")["url"]
            made = ca or self.await_log("certificate made for this run")["ca"]
            self.tls = ssl.create_default_context(cafile=made)
        except BaseException:
            self.kill()
            raise

    def await_log(self, event: str, wanted: Callable[[Json], bool] = lambda _: True) -> Json:
        """Return the first structured line of ``event`` that is wanted, as soon as it is there."""

        def fits(line: str) -> bool:
            return line.startswith("{") and (fields := json.loads(line))["event"] == event and wanted(fields)

        line = self._out.first(fits)
        if line is None:
            raise RuntimeError(f"ended with status {self.process.wait()}, never {event!r}:\n{self.output()}")
        found: Json = json.loads(line)
        return found

    def connect(self) -> http.client.HTTPSConnection:
        """A connection of the caller's own, to be closed by it."""
        host = urllib.parse.urlsplit(self.url).netloc
        return http.client.HTTPSConnection(host, context=self.tls, timeout=PATIENCE)

    def send(self, method: str, path: str, body: Body = None, headers: Mapping[str, str] = JSON_TYPE) -> Reply:
        """Make one request on a new connection."""
        with closing(self.connect()) as connection:
            return exchange(connection, method, path, body, headers)

    def get(self, path: str) -> Reply:
        """GET on a new connection."""
        return self.send("GET", path)

    def review(self, path: str, subject: object, **fields: object) -> Json:
        """Return the response to a review of the creation of ``subject``, checked to be of the right form."""
        asked = review_of(subject, **fields)
        reply = self.send("POST", path, json.dumps(asked))
        assert reply.status == http.HTTPStatus.OK, reply
        answer = reply.decoded()
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        response: Json = answer["response"]
        assert response["uid"] == asked["request"]["uid"]
        return response

    def admit(self, pod: Json, **fields: object) -> Json:
        """Take a pod through /mutate and /validate as the API server does; return the last response."""
        response = self.review("/mutate", pod, **fields)
        if not response["allowed"]:
            return response
        return self.review("/validate", with_uid(patched(pod, response)), **fields)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        text = self.get("/metrics").body.decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    def logs(self) -> list[Json]:
        """The structured lines so far; all of them once the process has ended."""
        return [json.loads(line) for line in self._out.so_far()]

    def output(self) -> str:
        """Everything printed so far, on both streams."""
        return "".join([*self._out.so_far(), *self._err.so_far()])

    def worker(self) -> int:
        """The process id of gunicorn's one worker."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    def wait(self) -> int:
        """Return the exit status once the process has ended and everything it printed is here."""
        status = self.process.wait(PATIENCE)
        self._out.join()
        self._err.join()
        return status

    def terminate(self) -> int:
        """SIGTERM; return the exit status once it has ended."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """End it and its worker without grace."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()


@contextmanager
def serving(
    *flags: str | Path, ca: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[WebhookProcess]:
    """A server with these flags of ``serve``, listening on a free port of 127.0.0.1; stopped at the end of the block.

    ``env`` adds to its environment. Unless told otherwise it stops at once, without the time endpoints need elsewhere.
    """
    server = WebhookProcess(flags, ca, env or {})
    try:
        yield server
        if server.process.poll() is None:
            server.terminate()
    finally:
        server.kill()


def exchange(
    connection: http.client.HTTPSConnection,
    method: str,
    path: str,
    body: Body = None,
    headers: Mapping[str, str] = JSON_TYPE,
) -> Reply:
    """Make one request on a connection that is kept; an iterable body goes out in chunks."""
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    return Reply(response.status, response.headers, response.read())
