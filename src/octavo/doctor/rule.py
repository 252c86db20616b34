"""What a rule is, and what it finds. The rules themselves are in files of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from octavo.doctor.snapshot import Snapshot

# By rank. A hint says what may be gained, and leaves a server healthy.
Severity = Literal["critical", "warning", "hint"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "hint")

Evidence = tuple[str, ...]


class Finding(msgspec.Struct, frozen=True):
    """A symptom that a server shows."""

    rule: str
    severity: Severity
    symptom: str
    evidence: Evidence
    cause: str
    cure: str


@dataclass(frozen=True, slots=True)
class Rule:
    """find: the evidence for the symptom in a snapshot; None where there is none. local: whether
    it needs facts of the machine, which only a server on this one gives."""

    name: str
    severity: Severity
    symptom: str
    cause: str
    cure: str
    find: Callable[[Snapshot], Evidence | None]
    local: bool = False

    def __call__(self, snapshot: Snapshot) -> Finding | None:
        evidence = self.find(snapshot)
        if evidence is None:
            return None
        return Finding(self.name, self.severity, self.symptom, evidence, self.cause, self.cure)


def settings(snapshot: Snapshot, *names: str) -> str:
    """Settings of the server as evidence."""
    found = [f"{name} is {snapshot.last.setting(name) or 'not set'}" for name in names]
    return ", ".join(found)


def percent(share: float) -> str:
    return f"{100 * share:.3g}%"
