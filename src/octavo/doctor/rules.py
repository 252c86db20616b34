"""The list of rules, by rank among those of one severity, and what they find together."""

from octavo.doctor import host, load, memory, service
from octavo.doctor.rule import SEVERITIES, Finding, Rule
from octavo.doctor.snapshot import Snapshot

RULES: tuple[Rule, ...] = (*service.RULES, *memory.RULES, *load.RULES, *host.RULES)

_STEPS = "octavo:steps_total"


def diagnose(snapshot: Snapshot) -> list[Finding]:
    """The symptoms, most severe first."""
    found = [finding for rule in RULES if (finding := rule(snapshot))]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def not_judged(snapshot: Snapshot) -> list[str]:
    """What this snapshot cannot show, so that its absence is no proof."""
    missing = []
    if not snapshot.recent.count(_STEPS):
        missing.append(
            f"no step ran {snapshot.recent.words}: what only shows under load was not seen"
        )
    if snapshot.now.machine is None:
        names = ", ".join(rule.name for rule in RULES if rule.local)
        missing.append(f"the server is on another machine, so these were not judged: {names}")
    return missing


def is_healthy(findings: list[Finding]) -> bool:
    """Hints leave a server healthy."""
    return all(finding.severity == "hint" for finding in findings)
