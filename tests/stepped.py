"""Simulates processes that share an API server. A test runs one process at a time, up to its next API call."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

from tests.api_double import Api, Effect
from vcuda.errors import Unavailable, VcudaError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class TrueTime:
    """The true time in seconds. The clock of each process is computed from it."""

    def __init__(self) -> None:
        self.now = 10_000.0


class DriftingClock:
    """The clock of one process. It may run fast or slow, and does not advance while its machine is suspended."""

    def __init__(self, true: TrueTime, rate: float = 1.0) -> None:
        self._true = true
        self._rate = rate
        self.stood_still = 0.0

    def now(self) -> float:
        return (self._true.now - self.stood_still) * self._rate


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is the given ``clock``. A test runs it until every task waits for something."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._now = clock
        self._busy = False

    def time(self) -> float:
        return self._now()

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._busy = True
        return super().call_soon(callback, *args, context=context)

    def run_until_idle(self) -> None:
        self._busy = True
        while self._busy:
            self._busy = False
            super().call_soon(self.stop)
            self.run_forever()

    def end(self) -> None:
        for task in asyncio.all_tasks(self):
            task.cancel()
        self.run_until_idle()
        self.close()


class OpenCall:
    """An API call that has no answer yet. ``arrived``: True if the API server has processed the call."""

    def __init__(self, sender: object, method: str, effect: Effect) -> None:
        self.sender = sender
        self.method = method
        self._effect = effect
        self._outcome: Callable[[], bytes] | None = None
        self.heard = threading.Semaphore(0)
        self.lost = False

    @property
    def arrived(self) -> bool:
        return self._outcome is not None

    def arrive(self) -> None:
        """Let the API server process the call, unless it has already done so. The answer is not delivered yet."""
        if self._outcome:
            return
        try:
            body = self._effect()
        except VcudaError as error:
            self._outcome = _raising(error)
        else:
            self._outcome = lambda: body

    def answer(self) -> bytes:
        if self.lost or self._outcome is None:
            raise Unavailable("timed out")
        return self._outcome()


def _raising(error: VcudaError) -> Callable[[], bytes]:
    def answer() -> bytes:
        raise error

    return answer


class Wire:
    """Holds the API calls of all processes. A test decides when each call reaches the server, is answered, or is lost.

    ``open``: the calls whose senders wait for an answer.
    ``late``: the calls that have timed out at their senders, but can still reach the server.
    """

    def __init__(self, api: Api) -> None:
        self.open: list[OpenCall] = []
        self.late: list[OpenCall] = []
        self._stopped = threading.Semaphore(0)
        self._senders: dict[int, object] = {}
        api.deliver = self._deliver

    def run(self, sender: object, work: Callable[[], object]) -> None:
        """Run ``work`` in a thread. Return when it makes its first API call or ends."""

        def run() -> None:
            self._senders[threading.get_ident()] = sender
            try:
                work()
            finally:
                del self._senders[threading.get_ident()]
                self._stopped.release()

        threading.Thread(target=run, daemon=True).start()
        self._stopped.acquire()

    def answer(self, call: OpenCall) -> None:
        """Let the API server process the call if needed, and deliver the answer. The sender runs to its next call."""
        call.arrive()
        self._go_on(call)

    def give_up(self, call: OpenCall, *, lands: bool = False) -> None:
        """Let the call time out at its sender. If ``lands`` is true, a call that has not arrived may do so later."""
        if lands and not call.arrived:
            self.late.append(call)
        call.lost = True
        self._go_on(call)

    def land(self) -> None:
        late, self.late = self.late, []
        for call in late:
            call.arrive()

    def of(self, sender: object) -> list[OpenCall]:
        return [call for call in self.open if call.sender is sender]

    def _go_on(self, call: OpenCall) -> None:
        self.open.remove(call)
        call.heard.release()
        self._stopped.acquire()

    def _deliver(self, method: str, _timeout: float, effect: Effect) -> bytes:
        sender = self._senders.get(threading.get_ident())
        if sender is None:  # the test itself makes this call
            return effect()
        call = OpenCall(sender, method, effect)
        self.open.append(call)
        self._stopped.release()
        call.heard.acquire()
        return call.answer()


class WireExecutor(Executor):
    """Runs the API calls of one process. A result takes effect when the event loop of the process runs next."""

    def __init__(self, wire: Wire, sender: object) -> None:
        self._wire = wire
        self._sender = sender

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def work() -> None:
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # the future raises this error in the caller
                future.set_exception(error)

        self._wire.run(self._sender, work)
        return future
