"""Rules on load: how many requests run and wait, and how steadily tokens come."""

from octavo.doctor.rule import Evidence, Rule, percent, settings
from octavo.doctor.snapshot import Snapshot

_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_RECEIVED = "octavo:requests_received_total"
_ENDED = "vllm:e2e_request_latency_seconds_count"
_ITL = "vllm:inter_token_latency_seconds"
_TTFT = "vllm:time_to_first_token_seconds"
_QUEUE = "vllm:request_queue_time_seconds"
_STEP = "vllm:iteration_tokens_total"

# Of the KV cache: below it memory is not what requests wait for (docs/tuning.md has the same).
KV_FREE = 0.8
# A queue that is longer by one or by less than a tenth is as long as before.
GROWTH_LEAST, GROWTH_SHARE = 2, 0.1
# A person notices a wait of a second; where it is half of the time to the first token, the queue
# and not the prompt is what they wait for.
QUEUE_SECONDS, QUEUE_SHARE, QUEUE_LEAST = 1.0, 0.5, 10
# A pause of a tenth of a second is seen in streamed text. The default `max_stretch=4` of a server
# bounds a step to 4 times one without prompts, so 5 times is more than it allows.
PAUSE_SECONDS, UNSTEADY, ITL_LEAST = 0.1, 5.0, 200
# Steps with prompts have many times the tokens of those without.
MIXED = 4.0


def _batch_too_small(snapshot: Snapshot) -> Evidence | None:
    limit = snapshot.last.number("max_num_seqs")
    waiting, running = snapshot.both(_WAITING), snapshot.both(_RUNNING)
    held = snapshot.last.most("vllm:kv_cache_usage_perc")
    if limit is None or min(waiting) < 1 or held >= KV_FREE:
        return None
    if min(running) < limit * snapshot.engines:
        return None
    engines = f" in each of {snapshot.engines} engines" if snapshot.engines > 1 else ""
    return (
        f"{waiting[0]:.0f} waited, now {waiting[1]:.0f}; {running[1]:.0f} run, and max_num_seqs "
        f"is {limit:.0f}{engines}",
        f"{percent(held)} of the KV cache is held",
    )


def _queue_growth(snapshot: Snapshot) -> Evidence | None:
    before, now = snapshot.both(_WAITING)
    received, ended = snapshot.rate(_RECEIVED), snapshot.rate(_ENDED)
    if now - before < max(GROWTH_LEAST, GROWTH_SHARE * now) or received <= ended:
        return None
    return (
        f"{before:.0f} waited, now {now:.0f}",
        f"{received:.3g} requests/s come, {ended:.3g} end {snapshot.recent.words}",
    )


def _long_wait(snapshot: Snapshot) -> Evidence | None:
    period = snapshot.period(f"{_QUEUE}_count", QUEUE_LEAST)
    if period is None:
        return None
    queue, first = period.mean(_QUEUE), period.mean(_TTFT)
    if queue < QUEUE_SECONDS or queue < QUEUE_SHARE * first:
        return None
    return (
        f"{queue:.3g} s in the queue on average, {first:.3g} s to the first token, {period.words}",
    )


def _unsteady(snapshot: Snapshot) -> Evidence | None:
    period = snapshot.period(f"{_ITL}_count", ITL_LEAST)
    if period is None:
        return None
    usual, late = period.percentile(_ITL, 0.5), period.percentile(_ITL, 0.99)
    tokens, most = period.percentile(_STEP, 0.5), period.percentile(_STEP, 0.99)
    if late < max(PAUSE_SECONDS, UNSTEADY * usual) or most < MIXED * tokens:
        return None
    return (
        f"between tokens: median {1000 * usual:.3g} ms, P99 {1000 * late:.3g} ms, {period.words}",
        f"tokens of a step: median {tokens:.3g}, P99 {most:.3g}; "
        + settings(snapshot, "max_num_batched_tokens", "scheduler"),
    )


RULES = (
    Rule(
        "batch-too-small", "warning", "requests wait although KV memory is free",
        "as many run as `--max-num-seqs` allows: steps are smaller than they could be",
        "raise `--max-num-seqs`",
        _batch_too_small,
    ),
    Rule(
        "queue-growth", "warning", "the queue grows",
        "more requests come than end",
        "a faster server (docs/tuning.md), more engines (`--data-parallel-size`), or fewer "
        "requests: `--max-waiting` refuses those that would wait too long",
        _queue_growth,
    ),
    Rule(
        "long-wait", "warning", "requests wait longer for their turn than for their first step",
        "the load is at or above what the server can do, or came in a burst",
        "as for a queue that grows; `--scheduler priority` lets urgent requests pass, "
        "`--scheduler slo,p99_ttft_ms=1000,shed=true` refuses those that would be late",
        _long_wait,
    ),
    Rule(
        "unsteady-tokens", "warning", "tokens come in bursts",
        "steps that also compute long prompts delay the requests that are being answered",
        "bound the steps: `--scheduler fifo,max_stretch=2`, `--scheduler slo,p99_itl_ms=150`, or "
        "a lower `--max-num-batched-tokens`; `--scheduler priority` if only some requests matter",
        _unsteady,
    ),
)  # fmt: skip
