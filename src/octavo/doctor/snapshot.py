"""What a diagnosis is made of: two looks at a server, and the file that keeps them.

A file has the pages as they came, so that a later version can read more from them. It holds no
key, no prompt and no answer.
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from octavo.doctor.machine import Machine
from octavo.doctor.reading import Period, Reading
from octavo.errors import ConfigError, RequestError, brief, cause

_Format = Literal["octavo-doctor-1"]
FORMAT: _Format = "octavo-doctor-1"
_START = "process_start_time_seconds"
_DAY, _HOUR, _MINUTE = 86400, 3600, 60


class Look(msgspec.Struct, frozen=True):
    """A server at one moment. time: seconds since 1970. metrics, health: pages as they came;
    status: of /health. version, window, in_flight: of /version, /v1/models and /load, where the
    server said so. machine: None for a server elsewhere.
    """

    time: float
    metrics: str
    status: int = 200
    health: str = ""
    version: str = ""
    window: int | None = None
    in_flight: int | None = None
    machine: Machine | None = None


class Record(msgspec.Struct, frozen=True):
    """The content of a file."""

    format: _Format
    url: str
    before: Look
    now: Look


class Snapshot:
    """Two looks, the later one being `now`. Raises RequestError for pages that are not Octavo's."""

    def __init__(self, url: str, before: Look, now: Look) -> None:
        self.url = url
        self.before, self.now = before, now
        self.first, self.last = (
            Reading.parse(look.metrics, f"{url}/metrics") for look in (before, now)
        )

    @property
    def seconds(self) -> float:
        return max(1e-3, self.now.time - self.before.time)

    @property
    def uptime(self) -> float:
        return max(self.seconds, self.now.time - (self.last.total(_START) or self.now.time))

    @property
    def restarted(self) -> bool:
        """Between the two looks, by its supervisor."""
        return self.first.total(_START) != self.last.total(_START)

    @cached_property
    def recent(self) -> Period:
        return Period(self.first, self.last, f"in {self.seconds:.1f} s")

    @cached_property
    def life(self) -> Period:
        return Period(None, self.last, f"since the start, {spoken(self.uptime)} ago")

    def period(self, counter: str, least: float) -> Period | None:
        """The recent one if it counted at least so much, else all since the start, else None."""
        for period in (self.recent, self.life):
            if period.count(counter) >= least:
                return period
        return None

    def rate(self, counter: str, **labels: str) -> float:
        """Per second, between the two looks."""
        return self.recent.count(counter, **labels) / self.seconds

    def both(self, gauge: str) -> tuple[float, float]:
        """Its sum over engines, before and now."""
        return self.first.total(gauge), self.last.total(gauge)

    @property
    def engines(self) -> int:
        return len(self.last.samples["octavo:engine_up"])

    def save(self, file: Path) -> None:
        """Raises ConfigError where the file cannot be written."""
        record = Record(FORMAT, self.url, self.before, self.now)
        try:
            file.write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {cause(error)}") from None

    @classmethod
    def load(cls, file: Path) -> "Snapshot":
        """Raises ConfigError or RequestError for what is not a snapshot."""
        try:
            record = msgspec.json.decode(file.read_bytes(), type=Record)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {cause(error)}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{file} is not a snapshot of octavo doctor (--save): {brief(error, 120)}"
            ) from None
        if record.now.time < record.before.time:
            raise ConfigError(f"{file} is not a snapshot: its second look is before its first")
        try:
            return cls(record.url, record.before, record.now)
        except RequestError as error:
            raise ConfigError(f"{file} is not a snapshot of an Octavo server: {error}") from None


def reason_of(look: Look) -> str:
    """Why /health says that nothing is answered."""
    try:
        body = msgspec.json.decode(look.health)
    except (msgspec.DecodeError, RecursionError):
        return ""
    error = body.get("error") if isinstance(body, Mapping) else None
    return str(error.get("message", "")) if isinstance(error, Mapping) else ""


def down_of(look: Look) -> dict[str, str]:
    """Of several engines, why those do not answer that do not, by number."""
    try:
        down = msgspec.json.decode(look.health, type=dict[str, dict[str, str] | int]).get("down")
    except (msgspec.DecodeError, RecursionError):
        return {}
    return down if isinstance(down, dict) else {}


def spoken(seconds: float) -> str:
    """A span of time in one unit."""
    for unit, name in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"
