"""The requests whose engine has died: which wait for another engine, and which are to blame.

Pure: engines are numbers, and times come from the caller. Not here: what a request is and how far
it had come (`engine.client`, `engine.output`), and which engine takes it (`engine.routing`).

An engine that dies may have been killed by one of its requests, which would kill the next one
too. So every request that it had is a suspect, and an engine is given one suspect after the other:
if it dies as well, it is known which one is to blame. A request is cleared by `CLEARING_TOKENS`
tokens: the first is drawn from its recomputed context, the second in an ordinary decoding step. A
suspect whose engine dies again is not given to a third one, and no request goes on after
`MOST_DEATHS` deaths with fewer than `HEALTHY_TOKENS` tokens after each. A suspect that is not
cleared within `SUSPECT_SECONDS`, since it waits for memory or has a long context, holds up the
others no longer.
"""

from dataclasses import dataclass

CLEARING_TOKENS = 2
SUSPECT_SECONDS = 1.0
MOST_DEATHS = 5
HEALTHY_TOKENS = 100
_IN_A_ROW = 2  # deaths, without a cleared suspicion between them


@dataclass(slots=True)
class _Record:
    """deaths: of engines that had the request; in_a_row: of them, since it was last cleared.
    engine: which has it as a suspect since `sent`. gained: tokens, since then."""

    deaths: int = 0
    in_a_row: int = 0
    engine: int | None = None
    sent: float = 0.0
    gained: int = 0


class Journal:
    """What is known of each interrupted request, until it ends or has run well again."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._waiting: dict[str, None] = {}  # in the order of their interruption
        self._suspects: dict[int, dict[str, _Record]] = {}  # by the engine that has them

    def __len__(self) -> int:
        return len(self._records)

    @property
    def waiting(self) -> list[str]:
        """Those that no engine has, the first interrupted first."""
        return list(self._waiting)

    def interrupt(self, request_id: str) -> str | None:
        """The engine that had the request has died. Returns why it must not go on, or None: it
        waits from now on."""
        record = self._records.setdefault(request_id, _Record())
        self._part(request_id, record)
        record.deaths += 1
        record.in_a_row += 1
        if record.in_a_row >= _IN_A_ROW:
            return (
                f"{record.in_a_row} engines in a row have died while they computed this request, "
                "so it is not given to another one"
            )
        if record.deaths >= MOST_DEATHS:
            return f"{record.deaths} engines that computed this request have died"
        self._waiting[request_id] = None
        return None

    def has_room(self, engine: int, now: float) -> bool:
        """Whether an engine may be given a suspect."""
        suspects = self._suspects.get(engine, {}).values()
        return all(now - record.sent >= SUSPECT_SECONDS for record in suspects)

    def sent(self, request_id: str, engine: int, now: float) -> None:
        """An engine was given a request that waited."""
        del self._waiting[request_id]
        record = self._records[request_id]
        record.engine, record.sent, record.gained = engine, now, 0
        self._suspects.setdefault(engine, {})[request_id] = record

    def gained(self, request_id: str, tokens: int) -> bool:
        """A request gained tokens. Whether that has cleared a suspect just now."""
        record = self._records.get(request_id)
        if record is None:
            return False
        record.gained += tokens
        if record.gained >= HEALTHY_TOKENS:
            del self._records[request_id]
        if not record.in_a_row or record.gained < CLEARING_TOKENS:
            return False
        record.in_a_row = 0
        self._part(request_id, record)
        return True

    def forget(self, request_id: str) -> bool:
        """A request has ended. Whether its engine may now be given another suspect."""
        record = self._records.pop(request_id, None)
        if record is None:
            return False
        self._waiting.pop(request_id, None)
        return self._part(request_id, record)

    def _part(self, request_id: str, record: _Record) -> bool:
        """Take it from the suspects of its engine; whether it was one."""
        engine, record.engine = record.engine, None
        suspects = self._suspects.get(engine, {}) if engine is not None else {}
        return suspects.pop(request_id, None) is not None
