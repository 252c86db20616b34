"""The wait of interrupted requests for another engine: who goes on when, and until when.

An engine that serves is given the requests that wait, in the order of their interruption, one
after the other (`engine.journal`). While no engine serves, since the only one is being started
again, they wait for at most `RESUME_SECONDS`, or until their deadline. What is sent, and where a
failure goes, is `engine.client`.
"""

import asyncio
from collections.abc import Callable, Sequence

from octavo.engine.journal import SUSPECT_SECONDS, Journal
from octavo.engine.link import EngineLink
from octavo.errors import EngineError

RESUME_SECONDS = 300.0


class Resumption:
    """The interrupted requests of one client, by their ids.

    serving: the engines that answer now. send: gives a request to one of several engines and
    returns it, or fails the request and returns None. fail: ends a request with an error.
    """

    def __init__(
        self,
        serving: Callable[[], Sequence[EngineLink]],
        send: Callable[[str, Sequence[EngineLink]], EngineLink | None],
        fail: Callable[[str, EngineError], None],
    ) -> None:
        self._serving, self._send, self._fail = serving, send, fail
        self._journal = Journal()
        self._timers: dict[str, asyncio.TimerHandle] = {}  # of those that wait
        self._retry: asyncio.TimerHandle | None = None

    def interrupt(self, request_id: str, deadline: float | None) -> str | None:
        """The engine of a request has died. Returns why it must not go on, or None: it waits."""
        why = self._journal.interrupt(request_id)
        if why is None:
            now = asyncio.get_running_loop().time()
            seconds = RESUME_SECONDS
            if deadline is not None:
                seconds = max(0.0, min(seconds, deadline - now))
            self._set_timer(request_id, seconds)
        return why

    def gained(self, request_id: str, tokens: int) -> None:
        """A request, interrupted before or not, gained tokens."""
        if self._journal.gained(request_id, tokens):
            self._go_on_soon()

    def forget(self, request_id: str) -> None:
        """A request, interrupted before or not, has ended."""
        self._stop_timer(request_id)
        if self._journal.forget(request_id):
            self._go_on_soon()

    def __len__(self) -> int:
        """Requests that were interrupted and have not ended."""
        return len(self._journal)

    def go_on(self) -> None:
        """Send those that wait, as far as there are engines with room for a suspect."""
        now = asyncio.get_running_loop().time()
        for request_id in self._journal.waiting:
            links = [link for link in self._serving() if self._journal.has_room(link.index, now)]
            if not links:
                self._try_again_later()
                return
            if link := self._send(request_id, links):
                self._stop_timer(request_id)
                self._journal.sent(request_id, link.index, now)

    def close(self) -> None:
        for timer in (*self._timers.values(), *([self._retry] if self._retry else ())):
            timer.cancel()

    def _go_on_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.go_on)

    def _try_again_later(self) -> None:
        if self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(SUSPECT_SECONDS, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        self.go_on()

    def _set_timer(self, request_id: str, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[request_id] = loop.call_later(seconds, self._give_up_on, request_id)

    def _stop_timer(self, request_id: str) -> None:
        if timer := self._timers.pop(request_id, None):
            timer.cancel()

    def _give_up_on(self, request_id: str) -> None:
        if self._serving():  # it waits for its turn
            self._set_timer(request_id, RESUME_SECONDS)
        else:
            text = "the engine died, and none could continue the request in time"
            self._fail(request_id, EngineError(text))
