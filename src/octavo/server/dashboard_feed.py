"""The form of `GET /dashboard/events`: what each event of the dashboard's stream holds.

`?engine=N` names one of the data-parallel engines (default: 0), `?request=ID` a request to follow.
Server-sent events: `event: snapshot`, at most four a second, has an `Update` as its data, on one
line; `event: end` is the last one and has an `End`. A client whose connection ends without it
connects again. A slow client misses snapshots, and always gets the newest.

Where the server has API keys, the stream needs one in the Authorization header, as the API does;
so does the page itself, `GET /dashboard`: without one its status is 401, and what a browser shows
then asks for the key, keeps it in sessionStorage as `octavo-key` and sends it with each fetch.

Sending is `server.dashboard_hub`'s duty; the form of what the engine computes is `engine.watch`'s.
"""

import msgspec

from octavo.engine.watch import Followed

VERSION = 1  # of this form; a field that is added does not change it


class Quantiles(msgspec.Struct, frozen=True, gc=False):
    """Percentiles of the samples of the last `window` seconds, in seconds; null without one."""

    p50: float | None
    p90: float | None
    p99: float | None
    count: int


class Latencies(msgspec.Struct, frozen=True, gc=False):
    """Time to the first token, between tokens, and to the end of a request.

    window: seconds over which they are taken; shorter after the first client has connected.
    """

    window: float
    ttft: Quantiles
    itl: Quantiles
    e2e: Quantiles


class Rates(msgspec.Struct, frozen=True, gc=False):
    """The engine's statistics, as on /metrics; shares are 0 to 1.

    prompt_tokens_per_second, output_tokens_per_second, device_utilization: over the last 10 s.
    kv_usage: written slots of all; kv_blocks_usage: held blocks of all; fragmentation: unwritten
    slots of the held ones. hit_rate: of prompt tokens that were looked up in the prefix cache since
    the start, those that were found. The rest counts since the start: steps, preemptions
    (displaced: of them, for a more urgent request), swapped_out_blocks, swapped_in_blocks,
    finished requests by reason, output_tokens.
    """

    prompt_tokens_per_second: float
    output_tokens_per_second: float
    device_utilization: float
    kv_usage: float
    kv_blocks_usage: float
    fragmentation: float
    hit_rate: float
    steps: int
    output_tokens: int
    preemptions: int
    displaced: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    finished: dict[str, int]


class Group(msgspec.Struct, frozen=True, gc=False):
    """A KV group: kind is full or window; window in tokens, null for full."""

    kind: str
    window: int | None


class Settings(msgspec.Struct, frozen=True):
    """What was configured, as far as it explains what is seen.

    blocks, host_blocks: usable ones, without the null block. max_*: as configured. groups: the KV
    groups in order. targets: options of the scheduling policy that are numbers.
    """

    model: str
    version: str
    device: str
    scheduler: str
    targets: dict[str, float]
    preemption_mode: str
    prefix_caching: bool
    block_size: int
    blocks: int
    host_blocks: int
    kv_cache_dtype: str
    groups: tuple[Group, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    tensor_parallel_size: int


class EngineRow(msgspec.Struct, frozen=True):
    """One of the data-parallel engines. problem: why it does not answer now; null if it does.

    deaths: how often it has died; it is loaded again where the server was told so.
    """

    engine: int
    problem: str | None
    running: int
    waiting: int
    kv_blocks_usage: float
    deaths: int


class Update(msgspec.Struct, frozen=True):
    """The data of `event: snapshot`.

    version: of this form. time: seconds since 1970, here. number: counts the updates of this
    engine since the server's start; a reader may see gaps. interval: seconds to the next one, if
    all goes well. engine: whose; engines: all there are. settings: null until the model is loaded.
    rates, latencies: null until the engine has reported. snapshot: an `engine.watch.Snapshot`;
    null while the engine does not answer, and `engines` says why. names: of the engine's
    ids of requests in the snapshot, the ids that clients know (`X-Request-Id`, and `id` in
    answers); several prompts of one call have one name. follow: the id that was asked for by
    `?request=`, the engine's (which goes first) or one that clients know; followed: its blocks,
    null while no such request is known here; follow_engine: which engine computes it, null if
    none does.
    """

    version: int
    time: float
    number: int
    interval: float
    engine: int
    engines: tuple[EngineRow, ...]
    settings: Settings | None
    rates: Rates | None
    latencies: Latencies | None
    snapshot: msgspec.Raw
    names: dict[str, str]
    follow: str | None
    followed: Followed | None
    follow_engine: int | None = None


class End(msgspec.Struct, frozen=True):
    """The data of `event: end`: why the stream ends. retry: whether connecting again may help."""

    reason: str
    retry: bool
