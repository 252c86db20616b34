"""Who goes first, who gives way, and how much a step may do. (Being filled in.)"""

from collections.abc import Collection, Iterable
from typing import Any, Protocol

from octavo.core.request import Request


class Policy(Protocol):
    name: str

    def order(self, waiting: Collection[Request], now: float) -> Iterable[Request]: ...

    def victim(
        self, running: Collection[Request], for_request: Request, now: float
    ) -> Request | None: ...

    def budget(self, stats: Any) -> tuple[int, int]: ...
