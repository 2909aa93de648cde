"""The stored ledger of one namespace, as one webhook replica reads and writes it."""

import math

from vcuda.errors import Conflict, LedgerLost, Unavailable, WriteUnanswered
from vcuda.kube import Stored
from vcuda.ledger.ledger import Ledger
from webhook.ledger.shared import READ_TIMEOUT_SECONDS, REMEMBERED_SECONDS, WRITE_TIMEOUT_SECONDS, Shared
from webhook.ledger.spending import Spending


class StoredLedger:
    """Reads and writes the ledger of one namespace, and remembers the version that this replica wrote last.

    ``spending``: has the reservation of this replica in the ledger.
    """

    def __init__(self, namespace: str, shared: Shared, spending: Spending) -> None:
        self._namespace = namespace
        self._shared = shared
        self._spending = spending
        self._remembered: Stored | None = None
        self._remembered_at = -math.inf
        # If the outcome of the last write is unknown: the ledger that was sent, and the stored ledger that it replaces.
        self.unanswered: tuple[Ledger, Stored] | None = None

    def remember(self, stored: Stored) -> None:
        self._remembered, self._remembered_at = stored, self._shared.clock()

    def take(self) -> Stored | None:
        """Return the remembered ledger, and forget it; None if it is too old."""
        # Another process has probably written a newer version after a second.
        recent = self._shared.clock() - self._remembered_at < REMEMBERED_SECONDS
        remembered, self._remembered = self._remembered if recent else None, None
        return remembered

    async def read(self, *, opens: bool) -> Stored:
        """Read the ledger. ``opens``: True to create a missing ledger, which the caller must write."""
        store, reserved = self._shared.store, self._spending.reservation
        try:
            read = store.open if opens else store.read
            stored = await self._shared.in_thread(read, self._namespace, READ_TIMEOUT_SECONDS)
        except LedgerLost:
            reserved.forget()
            raise
        if stored.version is None:
            reserved.forget()
        reserved.observe(stored.ledger)
        return stored

    async def write(self, ledger: Ledger, replaced: Stored) -> Stored:
        write = self._shared.store.write
        try:
            stored = await self._shared.in_thread(write, self._namespace, ledger, replaced, WRITE_TIMEOUT_SECONDS)
        except Unavailable as error:
            if self._spending.reservation.active:
                self.unanswered = ledger, replaced
            raise WriteUnanswered from error
        self.unanswered = None
        self._spending.reservation.confirmed(stored.answered)
        if ledger.waiting != replaced.ledger.waiting:
            self._spending.asking.stored()
        return stored

    async def send_again(self) -> None:
        """Repeat a write whose outcome is unknown. A read could not show that the write will not be stored later."""
        # The repeated write may include the charge of a call that still waits. When this call is decided, the ledger
        # has its uid, so the charge is not added a second time.
        if unanswered := self.unanswered:
            try:
                self.remember(await self.write(*unanswered))
            except Conflict:
                # The stored ledger has a newer version. So the unanswered write has been stored, or never will be.
                self.unanswered = None
