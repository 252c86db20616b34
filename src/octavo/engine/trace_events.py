"""What an engine did, as events in the Chrome trace event format, for Perfetto and chrome://tracing.

Of the host, `plan` and `commit` of each step, and of the device `run`: complete events on two
threads, which do not overlap on one. Counters: tokens of the step, requests, KV blocks. Each
choice of a request is a tree of nestable async events with its own id: `request`, in it its
phases one after the other, and in a prefill its chunks:

    request r7   |queued|prefill          |decode      |preempted|recompute|decode     |
                        |chunk|chunk|chunk|                      |chunk    |

Times are microseconds of the system's monotonic clock, so traces of one machine can be joined.
The first event has the wall clock's time. Pure: records in, events out, in the order of records;
files and threads are `engine.trace_file`, and when something is recorded is `engine.trace`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.core.plan import StepPlan
from octavo.core.request import choice_id
from octavo.core.scheduler import Update
from octavo.engine.trace_file import Event

HOST, DEVICE = 1, 2  # threads of the trace
_THREADS = {HOST: "host: plan and commit", DEVICE: "device: run"}
_CATEGORY = "request"
# What a choice does after each state of it; what it computes then is in chunks.
_AFTER = {"queued": "prefill", "preempted": "recompute", "swapped": "swap in"}
_COMPUTES = frozenset(_AFTER.values())
_COPIES = {"copy": "copied_blocks", "out": "swapped_out_blocks", "in": "swapped_in_blocks"}
_KNOWN_LATER = ("cached_tokens", "preemptions")  # arguments of a choice


class Arrived(NamedTuple):
    """A request was queued. choices: those that it begins with; ends: how many will end.
    resumed: whether another engine has computed a part of it."""

    request_id: str
    time: float
    args: Mapping[str, Any]
    choices: tuple[int, ...] = (0,)
    ends: int = 1
    resumed: bool = False


class Ended(NamedTuple):
    """A request, or one choice, ended between two steps. choice: None for all."""

    request_id: str
    choice: int | None
    reason: str
    time: float


class Failed(NamedTuple):
    """The engine has died."""

    reason: str
    time: float


class Span(NamedTuple):
    start: float
    end: float


class Move(NamedTuple):
    """A choice began to run, was preempted or swapped. cached: prompt tokens found in the cache."""

    seq_id: str
    status: str
    time: float
    cached: int = 0


class Counts(NamedTuple):
    """Of requests, and of KV blocks that they hold, behind a step."""

    running: int
    waiting: int
    swapped: int
    kv_blocks: int


class Stepped(NamedTuple):
    """A step: times of its three calls, what it computed, gained and moved. discarded: tokens of
    requests that had ended meanwhile."""

    plan: StepPlan
    planned: Span
    ran: Span
    committed: Span
    updates: list[Update]
    moves: list[Move]
    counts: Counts
    discarded: int


@dataclass(slots=True)
class _Tree:
    """The async events of one choice that are open. last: time of the latest one, since none may
    be before it."""

    key: str
    args: dict[str, Any]
    phase: str
    last: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Traced:
    """A request: its choices that have begun and not ended, and how many will still end."""

    args: Mapping[str, Any]
    left: int
    resumed: bool
    trees: dict[int, _Tree] = field(default_factory=dict)


@dataclass(slots=True)
class RequestEvents:
    """Makes the events of one engine. process: its id. name: of the engine and its model.

    origin: (monotonic, wall clock) seconds of one moment. about: of the engine, for the reader.
    """

    process: int
    name: str
    origin: tuple[float, float]
    about: Mapping[str, Any]
    _requests: dict[str, _Traced] = field(default_factory=dict)
    _free: dict[int, int] = field(default_factory=lambda: dict.fromkeys(_THREADS, 0))
    _counters: dict[str, Mapping[str, int]] = field(default_factory=dict)
    _part: int = 0
    _now: int = 0

    def begin(self) -> Iterator[Event]:
        """Names, and the choices that go on from the part before."""
        yield self._meta("process_name", HOST, {"name": self.name})
        for thread, name in _THREADS.items():
            yield self._meta("thread_name", thread, {"name": name})
            yield self._meta("thread_sort_index", thread, {"sort_index": thread})
        monotonic, wall = self.origin
        self._now = max(self._now, _us(monotonic))
        self._counters.clear()
        self._part += 1
        text = "the trace begins" if self._part == 1 else "the trace goes on from its earlier part"
        yield self._event("i", text, HOST, self._now, s="p", args={
            **self.about, "part": self._part, "unix_time": wall + self._now / 1e6 - monotonic,
        })  # fmt: skip
        for tree in self._open_trees():
            yield from self._open(tree, self._now)

    def end(self, complete: bool) -> Iterator[Event]:
        """The ends of what is open; it goes on in the next part, unless the trace is complete."""
        for tree in self._open_trees():
            yield from self._close(tree, self._now, {"unfinished": True})
        text = "the trace ends" if complete else "the trace goes on in its next part"
        yield self._event("i", text, HOST, self._now, s="p", args={"part": self._part})

    def of(self, record: object) -> Iterator[Event]:
        if isinstance(record, Stepped):
            yield from self._step(record)
        elif isinstance(record, Arrived):
            yield from self._arrived(record)
        elif isinstance(record, Ended):
            yield from self._ended(record)
        elif isinstance(record, Failed):
            yield self._event("i", "the engine died", HOST, _us(record.time), s="p",
                              args={"reason": record.reason})  # fmt: skip

    # Steps.

    def _step(self, step: Stepped) -> Iterator[Event]:
        plan = step.plan
        planned = {"step": plan.step, "rows": len(plan.rows)}
        yield from self._slice("plan", HOST, step.planned, planned)
        for move in step.moves:
            yield from self._moved(move, _us(move.time))
        prefill = 0
        for row in plan.rows:
            tree = self._tree(row.request_id)
            if tree is not None and tree.phase in _COMPUTES:
                prefill += len(row.token_ids)
                args = {"step": plan.step, "tokens": len(row.token_ids), "from": row.start}
                yield self._nested("b", "chunk", tree, _us(step.ran.start), args)
                yield self._nested("e", "chunk", tree, _us(step.ran.end))
        tokens = {"prefill": prefill, "decode": plan.num_tokens - prefill}
        yield from self._count("tokens", _us(step.ran.start), tokens)
        ran = {**planned, "tokens": plan.num_tokens, **tokens, **_copies(plan)}
        if step.discarded:
            ran["discarded"] = step.discarded
        yield from self._slice("run", DEVICE, step.ran, ran)
        gained = sum(len(update.token_ids) for update in step.updates)
        committed = {"step": plan.step, "generated": gained}
        yield from self._slice("commit", HOST, step.committed, committed)
        yield from self._committed(step)

    def _committed(self, step: Stepped) -> Iterator[Event]:
        end = _us(step.committed.end)
        for update in step.updates:
            yield from self._gained(update, end)
        counts = step.counts._asdict()
        yield from self._count("KV blocks", end, {"held": counts.pop("kv_blocks")})
        yield from self._count("requests", end, counts)

    def _slice(
        self, name: str, thread: int, span: Span, args: Mapping[str, Any]
    ) -> Iterator[Event]:
        """On one thread slices follow each other: one begins no earlier than the last has ended."""
        start = max(_us(span.start), self._free[thread])
        end = self._free[thread] = max(start, _us(span.end))
        yield self._event("X", name, thread, start, dur=end - start, args=args)

    def _count(self, name: str, time: int, values: Mapping[str, int]) -> Iterator[Event]:
        """A counter, where it has changed."""
        if self._counters.get(name) != values:
            self._counters[name] = values
            yield self._event("C", name, HOST, time, args=values)

    # Requests.

    def _arrived(self, record: Arrived) -> Iterator[Event]:
        request = _Traced(record.args, record.ends, record.resumed)
        self._requests[record.request_id] = request
        time = _us(record.time)
        for index in record.choices:
            phase = "preempted" if record.resumed else "queued"
            yield from self._begin(record.request_id, request, index, phase, time)

    def _moved(self, move: Move, time: int) -> Iterator[Event]:
        tree = self._tree(move.seq_id)
        if tree is None:
            return
        if move.status == "running":
            if move.cached and tree.phase == "queued":
                tree.args["cached_tokens"] = move.cached
            if tree.phase in _AFTER:  # else it was just forked
                yield from self._enter(tree, _AFTER[tree.phase], time)
        else:
            tree.args["preemptions"] = tree.args.get("preemptions", 0) + 1
            yield from self._enter(tree, move.status, time)

    def _gained(self, update: Update, time: int) -> Iterator[Event]:
        request = self._requests.get(update.request_id)
        if request is None:
            return
        if update.index not in request.trees:  # it has just been forked
            yield from self._begin(update.request_id, request, update.index, "decode", time)
        tree = request.trees[update.index]
        if update.token_ids:
            tree.tokens += len(update.token_ids)
            if tree.phase != "decode":
                yield from self._enter(tree, "decode", time)
            if tree.tokens == len(update.token_ids) and not request.resumed:
                yield self._nested("n", "first token", tree, time)
        if update.finish_reason is not None:
            error = {} if update.error is None else {"error": update.error}
            args = {"finish_reason": update.finish_reason, **error}
            yield from self._finish(update.request_id, request, update.index, time, args)

    def _ended(self, record: Ended) -> Iterator[Event]:
        request = self._requests.get(record.request_id)
        if request is None:
            return
        args = {"finish_reason": record.reason}
        for index in list(request.trees) if record.choice is None else [record.choice]:
            if index in request.trees:
                time = _us(record.time)
                yield from self._finish(record.request_id, request, index, time, args)
        if record.choice is None:
            self._requests.pop(record.request_id, None)

    def _begin(
        self, request_id: str, request: _Traced, index: int, phase: str, time: int
    ) -> Iterator[Event]:
        tree = _Tree(choice_id(request_id, index), dict(request.args), phase)
        request.trees[index] = tree
        yield from self._open(tree, time)

    def _finish(
        self, request_id: str, request: _Traced, index: int, time: int, args: Mapping[str, Any]
    ) -> Iterator[Event]:
        tree = request.trees.pop(index)
        found: dict[str, Any] = {**args, "output_tokens": tree.tokens}
        found |= {name: tree.args[name] for name in _KNOWN_LATER if name in tree.args}
        yield from self._close(tree, time, found)
        request.left -= 1
        if request.left <= 0:
            del self._requests[request_id]

    def _open(self, tree: _Tree, time: int) -> Iterator[Event]:
        yield self._nested("b", "request", tree, time, {"id": tree.key, **tree.args})
        yield self._nested("b", tree.phase, tree, time)

    def _enter(self, tree: _Tree, phase: str, time: int) -> Iterator[Event]:
        yield self._nested("e", tree.phase, tree, time)
        tree.phase = phase
        yield self._nested("b", phase, tree, time)

    def _close(self, tree: _Tree, time: int, args: Mapping[str, Any]) -> Iterator[Event]:
        yield self._nested("e", tree.phase, tree, time)
        yield self._nested("e", "request", tree, time, args)

    def _open_trees(self) -> list[_Tree]:
        return [tree for request in self._requests.values() for tree in request.trees.values()]

    def _tree(self, seq_id: str) -> _Tree | None:
        """Of the id that a row has, see `core.request.choice_id`."""
        request_id, _, index = seq_id.rpartition("#")
        if index.isdecimal() and (request := self._requests.get(request_id)):
            return request.trees.get(int(index))
        request = self._requests.get(seq_id)
        return None if request is None else request.trees.get(0)

    # Events.

    def _nested(
        self, phase: str, name: str, tree: _Tree, time: int, args: Mapping[str, Any] | None = None
    ) -> Event:
        tree.last = max(tree.last, time)
        event = self._event(phase, name, HOST, tree.last, cat=_CATEGORY, id=tree.key)
        if args:
            event["args"] = dict(args)
        return event

    def _event(self, phase: str, name: str, thread: int, time: int, **more: Any) -> Event:
        self._now = max(self._now, time + more.get("dur", 0))
        return {"ph": phase, "name": name, "pid": self.process, "tid": thread, "ts": time, **more}

    def _meta(self, name: str, thread: int, args: Mapping[str, Any]) -> Event:
        return {"ph": "M", "name": name, "pid": self.process, "tid": thread, "ts": 0, "args": args}


def _copies(plan: StepPlan) -> dict[str, int]:
    """Of whole KV blocks, by their kind."""
    found: dict[str, int] = {}
    for copy in plan.copies:
        name = _COPIES[copy.kind]
        found[name] = found.get(name, 0) + 1
    return found


def _us(seconds: float) -> int:
    return round(1e6 * seconds)
