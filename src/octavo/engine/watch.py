"""The form of what an engine shows of itself: its requests, its blocks, why it does what it does.

Plain values that cross to the web process and, as JSON, to the dashboard (`server.dashboard_feed`),
where `bytes` are base64 text. No token ids, no texts. Computing them is `engine.watcher`'s duty.

Times are seconds of the engine's monotonic clock: compare them with `Snapshot.now` only.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from octavo.outputs import FinishReason

# Owners of a block that are not the number of a row.
FREE = 0
UNLISTED = 65534  # one request, which `Snapshot.requests` leaves out, or which has just ended
SEVERAL = 65535  # more than one request; or none, while the content is cached

# Flags of a block.
SHARED = 1  # more than one request holds it
CACHED = 2  # its content can be found by its name: requests with the same prefix share it
HOST = 4  # it is a block of the host's pool, that is, of swapped requests

NO_GROUP = 255

MOST_BLOCKS = 1 << 18  # that a map shows
MOST_LIVE = 512  # rows of requests that have not ended
MOST_ENDED = 64  # rows of those that have
MOST_MARKS = 48  # of one request
MOST_CHANGES = 64
MOST_FOLLOWED = 16  # requests whose blocks are listed

State = Literal["waiting", "running", "preempted", "swapped", "finished"]
MarkName = Literal[
    "arrived",  # at the engine
    "planned",  # first served by a step
    "prefill",  # a part of its prompt was computed: `tokens` so far
    "first_token",
    "preempted",  # its blocks were released
    "swapped",  # its blocks were copied to the host
    "resumed",  # it runs again
    "finished",
]
ChangeName = Literal["preempted", "displaced", "resumed", "admission", "policy"]
Hold = Literal["max_num_seqs", "policy", "memory", "tokens"]


class Mark(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """An event in a request's life: in JSON `[name, at, tokens]`.

    tokens: computed at that time where it is known, else -1.
    """

    name: MarkName
    at: float
    tokens: int = -1


class RequestRow(msgspec.Struct, frozen=True, gc=False):
    """One choice of one request (`choice` counts from 0); of one that has ended, all its choices.

    id: the engine's. computed: tokens whose keys and values are computed, those of the steps in
    flight included. cached: prompt tokens found in the prefix cache. blocks: physical ones that it
    holds, in all KV groups; of a swapped one, on the host. preemptions: so far. reason: why it has
    ended. marks: its life so far, in order, at most MOST_MARKS.
    """

    id: str
    choice: int
    state: State
    prompt_tokens: int
    output_tokens: int
    computed: int
    cached: int
    max_tokens: int
    priority: int
    preemptions: int
    blocks: int
    reason: FinishReason | None
    marks: tuple[Mark, ...]


class BlockMap(msgspec.Struct, frozen=True):
    """The physical blocks of one pool; entry b of each array is block b.

    Block 0 is the null block: it is never held. blocks: of the pool, the null block included;
    shown: entries, at most MOST_BLOCKS. Arrays are little-endian.

    owner: uint16. 0 (FREE): nobody, and nothing is cached. 1 to 65533: row number `owner - 1` of
    `Snapshot.requests`. 65534 (UNLISTED): one request that has no row. 65535 (SEVERAL): more than
    one, or none but its content is cached; the flags say which.
    fill: uint8, computed tokens of the block, scaled so that 255 is a full one.
    flags: uint8, the sum of 1 (SHARED), 2 (CACHED), 4 (HOST).
    group: uint8, the KV group of the holders, 255 (NO_GROUP) without one; empty, and all are of
    group 0, where there is one KV group.
    """

    blocks: int
    shown: int
    owner: bytes
    fill: bytes
    flags: bytes
    group: bytes = b""


class Change(msgspec.Struct, frozen=True, gc=False):
    """Why the scheduler's state changed.

    number: counts all changes of this engine, so that a reader knows which are new.
    name: preempted (for memory) and displaced (by a more urgent one): `request` lost its blocks so
    that `other` could have them; resumed: `request` runs again; admission: what keeps waiting
    requests from starting has changed; policy: the scheduling policy changed its budget.
    text: one sentence, with the engine's ids of requests.
    """

    number: int
    at: float
    name: ChangeName
    text: str
    request: str = ""
    other: str = ""


class Queue(msgspec.Struct, frozen=True, gc=False):
    """The scheduler at this moment.

    step: steps planned so far. running, waiting, swapped, preempted: choices; waiting ones have
    never run, or have been preempted (then they count as preempted instead). step_tokens,
    step_sequences: the budget of the last step, as the policy set it. hold: what keeps the first
    waiting request from starting, None if none waits or the next step starts it:
    max_num_seqs (as many run as may), policy (its limit on running requests is lower), memory (too
    few free blocks), tokens (those of the step are used up). hold_text: the same as a sentence.
    reason: why the policy's budget is what it is, as the policy says; empty if it does not. gauges:
    those of the policy, by name.
    """

    step: int
    running: int
    waiting: int
    swapped: int
    preempted: int
    step_tokens: int
    step_sequences: int
    hold: Hold | None
    hold_text: str
    reason: str
    gauges: dict[str, float]


class Snapshot(msgspec.Struct, frozen=True):
    """One engine at one moment.

    now: the time, by the clock of all times here. seconds: that computing this took. requests:
    running ones first, then swapped, preempted and waiting ones, at most MOST_LIVE, then the last
    that ended, at most MOST_ENDED, the latest last; unlisted: live ones left out. changes: the
    last MOST_CHANGES, in order. pool: the blocks of the device; host: of the swap pool, None
    without one. free_blocks: blocks of the pool that no request holds; cached_blocks: blocks of the
    pool with a cached content, held or not.
    """

    now: float
    seconds: float
    queue: Queue
    requests: tuple[RequestRow, ...]
    unlisted: int
    changes: tuple[Change, ...]
    pool: BlockMap
    host: BlockMap | None
    free_blocks: int
    cached_blocks: int


class Table(msgspec.Struct, frozen=True):
    """The blocks of one choice in the order of its tokens.

    groups: of each KV group, an array of uint32, little-endian: block i holds the tokens from
    i x block_size on; 0 where it was released since it is behind the group's window. on_host:
    they are blocks of the host's pool. computed: tokens whose keys and values are computed.
    """

    choice: int
    on_host: bool
    computed: int
    groups: tuple[bytes, ...]


class Followed(msgspec.Struct, frozen=True):
    """A request that somebody follows, by the engine's id; no tables once it has ended."""

    id: str
    tables: tuple[Table, ...]


class View(msgspec.Struct, tag="view", array_like=True, frozen=True):
    """The answer to `engine.messages.Look`."""

    snapshot: Snapshot
    followed: Sequence[Followed] = ()
