"""Rules on whether requests are answered at all, and how they end."""

from octavo.doctor.rule import Evidence, Rule, percent
from octavo.doctor.snapshot import Snapshot, down_of, reason_of

_RECEIVED = "octavo:requests_received_total"
_ENDED = "vllm:request_success_total"
_REFUSED = "vllm:admission_rejections_total"

# Below one in a hundred it is a client's retry, not a state of the server.
REFUSED_SHARE = 0.01
FAILED_SHARE = 0.01
# People close windows and press stop, so some are always aborted; one in ten says more.
ABORTED_SHARE = 0.1
ABORTED_LEAST = 20  # ended choices: of fewer, a share of a tenth is one or two


def _unavailable(snapshot: Snapshot) -> Evidence | None:
    if snapshot.now.status == 200:
        return None
    reason = reason_of(snapshot.now) or "no reason given"
    return (f"/health says {snapshot.now.status}: {reason}",)


def _engine_down(snapshot: Snapshot) -> Evidence | None:
    down = [labels["engine"] for labels, up in snapshot.last.samples["octavo:engine_up"] if not up]
    if not down or snapshot.now.status != 200:
        return None
    reasons = down_of(snapshot.now)
    told = [f"engine {number}: {reasons.get(number, 'does not answer')}" for number in down]
    return (f"{len(down)} of {snapshot.engines} engines down", *told)


def _engine_died(snapshot: Snapshot) -> Evidence | None:
    deaths = snapshot.life.count("octavo:engine_deaths_total")
    if not deaths:
        return None
    resumed = snapshot.life.count("octavo:requests_resumed_total")
    return (
        f"{deaths:.0f} deaths of engines {snapshot.life.words}, "
        f"{snapshot.recent.count('octavo:engine_deaths_total'):.0f} of them "
        f"{snapshot.recent.words}",
        f"{resumed:.0f} requests continued on another engine",
    )


def _restarted(snapshot: Snapshot) -> Evidence | None:
    if not snapshot.restarted:
        return None
    return (f"the process of the second look is not that of the first, {snapshot.recent.words}",)


def _refused(snapshot: Snapshot) -> Evidence | None:
    for period in (snapshot.recent, snapshot.life):
        refused = period.count(_REFUSED)
        arrived = refused + period.count(_RECEIVED)
        if refused and refused >= REFUSED_SHARE * arrived:
            waiting = snapshot.last.total("vllm:num_requests_waiting")
            limit = snapshot.last.setting("max_waiting") or "unknown"
            return (
                f"{refused:.0f} of {arrived:.0f} requests refused {period.words}",
                f"{waiting:.0f} wait now; max_waiting is {limit}",
            )
    return None


def _share_of(snapshot: Snapshot, reason: str, share: float, least: int) -> Evidence | None:
    """Choices that ended for this reason, if they are `share` of at least `least`."""
    period = snapshot.period(_ENDED, least)
    if period is None:
        return None
    these = period.count(_ENDED, finished_reason=reason)
    ended = period.count(_ENDED)
    if not these or these < share * ended:
        return None
    return (f"{these:.0f} of {ended:.0f} choices ({percent(these / ended)}) {period.words}",)


def _failed(snapshot: Snapshot) -> Evidence | None:
    return _share_of(snapshot, "error", FAILED_SHARE, 1)


def _aborted(snapshot: Snapshot) -> Evidence | None:
    return _share_of(snapshot, "abort", ABORTED_SHARE, ABORTED_LEAST)


def _policy_errors(snapshot: Snapshot) -> Evidence | None:
    errors = snapshot.life.count("octavo:policy_errors_total")
    return (f"{errors:.0f} failures {snapshot.life.words}",) if errors else None


RULES = (
    Rule(
        "unavailable", "critical", "no request is answered",
        "the model is being loaded, the server ends, or its engine died or hangs; /health gives "
        "the reason",
        "wait while it loads; else see the server's log, and start it with `--restart-engine` so "
        "that it comes back by itself",
        _unavailable,
    ),
    Rule(
        "engine-down", "critical", "some engines do not answer, and the others do their work",
        "an engine died, or hangs",
        "see the server's log; `--restart-engine` starts dead ones again",
        _engine_down,
    ),
    Rule(
        "server-restarted", "critical", "the server was started again between the two looks",
        "its process ended, and a supervisor started another",
        "see the log of the process before, and `dmesg` for processes ended for want of memory",
        _restarted,
    ),
    Rule(
        "engine-died", "warning", "engines have died",
        "often the system, which ends the largest process where memory is short (`dmesg`); else "
        "the log has the reason",
        "lower `--kv-cache-memory-bytes` or `--gpu-memory-utilization`; restart the server once "
        "the reason is known, which also clears this count",
        _engine_died,
    ),
    Rule(
        "failed", "warning", "requests end with errors",
        "a fault of the engine or of the model's numbers (NaN)",
        "see the server's log, which has a trace for each",
        _failed,
    ),
    Rule(
        "policy-errors", "warning", "the scheduling policy fails",
        "an exception in a policy or weight_fn of your own; another policy takes its place",
        "see the server's log; compare with `--scheduler fifo`",
        _policy_errors,
    ),
    Rule(
        "refused", "warning", "requests are refused (503 `queue_full`)",
        "more requests than `--max-num-seqs` plus `--max-waiting`",
        "serve more of them at once (`--max-num-seqs`, `--data-parallel-size`), or let more wait "
        "(`--max-waiting`); clients should retry after the given time",
        _refused,
    ),
    Rule(
        "aborted", "warning", "clients leave before their answer ends",
        "answers come later than clients or proxies wait, or clients stop them on purpose",
        "raise the timeouts of clients and proxies, and look at what makes answers late; "
        "`--max-waiting` refuses at once what would wait too long",
        _aborted,
    ),
)  # fmt: skip
