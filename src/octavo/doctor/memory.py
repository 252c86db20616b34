"""Rules on the KV cache: pressure, preemption, waste, and what is found in it."""

from octavo.doctor.reading import Period
from octavo.doctor.rule import Evidence, Rule, percent, settings
from octavo.doctor.snapshot import Snapshot

_WAITING = "vllm:num_requests_waiting"
_HELD = "vllm:kv_cache_usage_perc"
_RECEIVED = "octavo:requests_received_total"
_PREEMPTIONS, _DISPLACED = "vllm:num_preemptions_total", "octavo:displaced_total"
_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
_PROMPT, _GENERATED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"

# Requests that wait with this much held wait for memory: the rest is less than what one needs.
KV_PRESSURE = 0.8
# One preemption in ten requests: each loses its KV, which is copied or computed a second time.
CHURN_LEAST, CHURN_SHARE = 5, 0.1
# Blocks of 16 waste at most 15 slots a request; a quarter of all is worth another size.
WASTE, USUAL_BLOCK = 0.25, 16
# Below a fifth, prompts that share a beginning should find more; of few tokens nothing is said.
HIT_SHARE, QUERIES_LEAST = 0.2, 4096
# Only where prompts are most of the work is there much to gain.
PROMPT_HEAVY = 4.0
PROMPTS_LEAST = 8


def _kv_pressure(snapshot: Snapshot) -> Evidence | None:
    waiting = snapshot.both(_WAITING)
    held = min(snapshot.first.most(_HELD), snapshot.last.most(_HELD))
    if min(waiting) < 1 or held < KV_PRESSURE:
        return None
    return (
        f"{percent(snapshot.last.most(_HELD))} of the KV cache is held; {waiting[0]:.0f} requests "
        f"waited for room, now {waiting[1]:.0f}",
        settings(snapshot, "max_num_seqs", "max_model_len", "kv_cache_dtype", "quantization"),
    )


def _churn(snapshot: Snapshot) -> Evidence | None:
    for period in (snapshot.recent, snapshot.life):
        # What a policy displaces for a more urgent request is its work, not want of memory.
        preempted = period.count(_PREEMPTIONS) - period.count(_DISPLACED)
        received = period.count(_RECEIVED)
        if preempted >= max(CHURN_LEAST, CHURN_SHARE * received):
            swapped = period.count("octavo:swapped_out_blocks_total")
            return (
                f"{preempted:.0f} preemptions and {received:.0f} new requests {period.words}; "
                f"{swapped:.0f} blocks copied to the host",
                settings(snapshot, "max_num_seqs", "swap_space", "preemption_mode"),
            )
    return None


def _waste(snapshot: Snapshot) -> Evidence | None:
    size = snapshot.last.number("block_size")
    waste = min(snapshot.first.most("octavo:kv_fragmentation"),
                snapshot.last.most("octavo:kv_fragmentation"))  # fmt: skip
    if size is None or size <= USUAL_BLOCK or waste < WASTE:
        return None
    prompt = snapshot.life.mean("vllm:request_prompt_tokens")
    answer = snapshot.life.mean("vllm:request_generation_tokens")
    return (
        f"{percent(waste)} of the slots in held blocks are not written; block_size is {size:.0f}",
        f"a request has {prompt:.0f} prompt and {answer:.0f} generated tokens on average",
    )


def _prompt_heavy(period: Period) -> bool:
    return period.count(_PROMPT) >= PROMPT_HEAVY * max(1.0, period.count(_GENERATED))


def _cache_misses(snapshot: Snapshot) -> Evidence | None:
    period = snapshot.period(_QUERIES, QUERIES_LEAST)
    if period is None or not _prompt_heavy(period):
        return None
    queried, hits = period.count(_QUERIES), period.count(_HITS)
    if hits >= HIT_SHARE * queried:
        return None
    return (
        f"{percent(hits / queried)} of {queried:.0f} prompt tokens found in the cache "
        f"{period.words}",
        f"{period.count(_PROMPT):.0f} prompt and {period.count(_GENERATED):.0f} generated tokens "
        "in answered requests",
    )


def _cache_off(snapshot: Snapshot) -> Evidence | None:
    period = snapshot.period(_RECEIVED, PROMPTS_LEAST)
    if snapshot.last.setting("enable_prefix_caching") != "False":
        return None
    if period is None or not _prompt_heavy(period):
        return None
    return (
        settings(snapshot, "enable_prefix_caching"),
        f"{period.count(_PROMPT):.0f} prompt and {period.count(_GENERATED):.0f} generated tokens "
        f"{period.words}",
    )


RULES = (
    Rule(
        "kv-pressure", "warning", "requests wait for KV memory",
        "the KV cache is full of what runs",
        "a larger one (`--kv-cache-memory-bytes`, `--gpu-memory-utilization`), half the bytes "
        "(`--kv-cache-dtype int8`), smaller weights (`--quantization int8`), shorter requests "
        "(`--max-model-len`), or fewer at once (`--max-num-seqs`)",
        _kv_pressure,
    ),
    Rule(
        "preemption-churn", "warning", "requests are preempted again and again",
        "more run at once than the KV cache holds as they grow: their KV is copied out or "
        "computed twice",
        "lower `--max-num-seqs`, enlarge the cache as above, or give preempted requests a place "
        "(`--swap-space`, `--swap-path`)",
        _churn,
    ),
    Rule(
        "block-size", "warning", "much of the held KV memory is empty",
        "blocks are large for requests of this length",
        "leave out `--block-size`: the default is 16 tokens",
        _waste,
    ),
    Rule(
        "prefix-cache-off", "hint", "prompts are most of the work, and their KV is not reused",
        "prefix caching is off",
        "leave out `--no-enable-prefix-caching`",
        _cache_off,
    ),
    Rule(
        "prefix-cache-misses", "hint", "few prompt tokens are found in the prefix cache",
        "prompts differ from their first tokens on, or what they share was evicted; if they have "
        "nothing in common, this is as it must be",
        "put what prompts share at their beginning, what changes (times, names) behind it, and "
        "use one `cache_salt` for those that may share; enlarge the KV cache if it is full",
        _cache_misses,
    ),
)  # fmt: skip
