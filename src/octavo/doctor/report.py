"""A diagnosis as text and as JSON."""

import textwrap
from typing import Any

import msgspec

from octavo.doctor.rule import Finding, percent
from octavo.doctor.rules import RULES, is_healthy, not_judged
from octavo.doctor.snapshot import Snapshot, spoken
from octavo.errors import counted

_LABEL, _INDENT = 10, "   "
# Figures of every report: name -> counter, of which the rate between the looks is shown.
_RATES = {
    "requests_per_second": "octavo:requests_received_total",
    "steps_per_second": "octavo:steps_total",
}
_GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "swapped": "octavo:num_requests_swapped",
    # Of the engine's last 10 s: the counters have a request's tokens when it ends.
    "prompt_tokens_per_second": "octavo:prompt_tokens_per_second",
    "generation_tokens_per_second": "octavo:generation_tokens_per_second",
}


def figures(snapshot: Snapshot) -> dict[str, float]:
    """What the server does: gauges of now, rates between the looks."""
    found = {name: snapshot.last.total(metric) for name, metric in _GAUGES.items()}
    found |= {name: snapshot.rate(metric) for name, metric in _RATES.items()}
    found["kv_cache_usage"] = snapshot.last.most("vllm:kv_cache_usage_perc")
    return {name: round(value, 4) for name, value in found.items()}


def as_json(snapshot: Snapshot, findings: list[Finding]) -> dict[str, Any]:
    """Of one object, with plain values."""
    return {
        "url": snapshot.url,
        "model": snapshot.last.model,
        "version": snapshot.now.version,
        "seconds": round(snapshot.seconds, 3),
        "uptime": round(snapshot.uptime, 3),
        "healthy": is_healthy(findings),
        "figures": figures(snapshot),
        "findings": msgspec.to_builtins(findings),
        "not_judged": not_judged(snapshot),
    }


def as_text(snapshot: Snapshot, findings: list[Finding], width: int = 100) -> str:
    """For a terminal of `width` columns, or a file."""
    parts = [_head(snapshot)]
    parts += [_shown(number, finding, width) for number, finding in enumerate(findings, 1)]
    last = [_wrapped("note", text, width, "") for text in not_judged(snapshot)]
    if is_healthy(findings):
        symptoms = "no symptom, but hints" if findings else "no symptom"
        last.insert(0, f"healthy: {symptoms}, by {counted(len(RULES), 'rule')}")
    text = "\n\n".join([*parts, *(["\n".join(last)] if last else [])])
    # A server says what it likes, and a terminal would obey.
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _head(snapshot: Snapshot) -> str:
    now = figures(snapshot)
    version = snapshot.now.version and f", octavo {snapshot.now.version}"
    window = f", window {snapshot.now.window}" if snapshot.now.window else ""
    return (
        f"{snapshot.url}: {snapshot.last.model}{version}{window}, up {spoken(snapshot.uptime)}\n"
        f"now: {now['running']:.0f} running, {now['waiting']:.0f} waiting, "
        f"{now['swapped']:.0f} swapped; {percent(now['kv_cache_usage'])} of the KV cache held\n"
        f"{snapshot.recent.words}: {now['requests_per_second']:.3g} new requests/s, "
        f"{now['steps_per_second']:.3g} steps/s; in the last 10 s: "
        f"{now['prompt_tokens_per_second']:.4g} prompt, "
        f"{now['generation_tokens_per_second']:.4g} generated tokens/s"
    )


def _shown(number: int, finding: Finding, width: int) -> str:
    lines = [f"{number}. {finding.severity}: {finding.symptom} [{finding.rule}]"]
    lines += [_wrapped("evidence", text, width) for text in finding.evidence]
    lines += [_wrapped("cause", finding.cause, width), _wrapped("cure", finding.cure, width)]
    return "\n".join(lines)


def _wrapped(label: str, text: str, width: int, indent: str = _INDENT) -> str:
    return textwrap.fill(
        text.replace("`", ""),
        width,
        initial_indent=f"{indent}{label:<{_LABEL}}",
        subsequent_indent=indent + " " * _LABEL,
        break_on_hyphens=False,
        break_long_words=False,
    )
