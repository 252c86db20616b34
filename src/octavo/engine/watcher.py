"""Computes what an engine shows of itself: the values of `engine.watch`.

Reads the scheduler, the KV manager and the recorder when it is asked to, and changes nothing of
them. What happened between two calls it takes from what they remember in any case, so an engine
that nobody watches does nothing for it.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar, cast

from octavo.core.queues import Transition
from octavo.core.request import Request, Status, choice_id
from octavo.core.scheduler import Scheduler
from octavo.engine.engine import Engine
from octavo.engine.stats import EndedRequest, RequestTimes
from octavo.engine.watch import (
    MOST_CHANGES,
    MOST_ENDED,
    MOST_FOLLOWED,
    MOST_LIVE,
    MOST_MARKS,
    UNLISTED,
    Change,
    ChangeName,
    Followed,
    Hold,
    Mark,
    MarkName,
    Queue,
    RequestRow,
    Snapshot,
    View,
)
from octavo.engine.watch_blocks import device_map, host_map, tables_of
from octavo.outputs import FinishReason

T = TypeVar("T")

_Key = tuple[str, int]  # a request's id and the number of a choice
_Known = tuple[float | None, float | None]  # when it was planned, and its first token
_Lives = dict[_Key, tuple[_Known, tuple[Mark, ...]]]


class Watcher:
    """Views of one engine. It remembers the marks of the requests that it lists, and the changes;
    the rest of a view is made anew each time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scheduler: Scheduler = engine.scheduler
        self._marks: dict[_Key, list[Mark]] = {}  # those that nothing else remembers
        self._lives: _Lives = {}  # of this view
        self._before: _Lives = {}  # of the last one
        self._rows: dict[str, RequestRow] = {}  # of choice 0, in the last view
        self._ended: deque[RequestRow] = deque(maxlen=MOST_ENDED)
        self._num_ended = self._num_transitions = 0
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self._num_changes = 0
        self._hold: Hold | None = None
        self._policy: tuple[Any, ...] | None = None

    def view(self, followed: Sequence[str] = ()) -> View:
        """The engine now, and the blocks of the requests with these ids."""
        started, now = time.perf_counter(), self._engine.clock()
        scheduler, kv = self._scheduler, self._scheduler.kv
        self._read_transitions()
        self._read_ended()
        live = list(islice(_live(scheduler), MOST_LIVE))
        queue = self._queue(now)
        self._read_policy(queue, now)
        self._read_hold(queue, now)
        self._before, self._lives = self._lives, {}
        rows = [self._row(request, now) for request in live]
        self._rows = {row.id: row for row in rows if row.choice == 0}
        self._forget()
        numbers = {request: number for number, request in enumerate(live, 1)}
        pool = device_map(kv, lambda request: numbers.get(request, UNLISTED))
        host = host_map(kv, lambda request: numbers.get(request, UNLISTED))
        found = [self._followed(name) for name in followed[:MOST_FOLLOWED]]
        snapshot = Snapshot(
            now,
            time.perf_counter() - started,
            queue,
            (*rows, *self._ended),
            len(scheduler.queues.running) + len(scheduler.queues.waiting) - len(live),
            tuple(self._changes),
            pool,
            host,
            kv.pool.num_free,
            kv.pool.num_cached,
        )
        return View(snapshot, [one for one in found if one is not None])

    def _followed(self, request_id: str) -> Followed | None:
        choices = self._scheduler.choices(request_id)
        if choices:
            return Followed(request_id, tables_of(choices, self._scheduler.kv.num_groups))
        known = any(row.id == request_id for row in self._ended)
        return Followed(request_id, ()) if known else None

    # Requests.

    def _row(self, request: Request, now: float) -> RequestRow:
        held = request.table.num_held
        if request.host_blocks:
            held = len(request.host_blocks) - request.host_blocks.count(0)
        return RequestRow(
            request.request_id,
            request.index,
            request.status.value,
            request.num_prompt_tokens,
            request.num_output_tokens,
            request.num_computed,
            request.num_cached_tokens,
            request.max_tokens,
            request.priority,
            request.num_preemptions,
            held,
            None,
            self._life(request, now),
        )

    def _life(self, request: Request, now: float) -> tuple[Mark, ...]:
        """The marks of a live choice."""
        times = self._engine.recorder.times(request.request_id)
        key = request.request_id, request.index
        own = self._marks.get(key, [])
        computed = request.num_computed
        prefills = request.status is Status.RUNNING and computed < request.num_prompt_tokens
        if prefills and computed and (not own or own[-1].tokens != computed):
            self._mark(key, Mark("prefill", now, computed))
        waits = request.status in (Status.PREEMPTED, Status.SWAPPED)
        if waits and not any(mark.name in ("preempted", "swapped") for mark in own):
            # Before the transitions that are remembered.
            name: MarkName = "swapped" if request.host_blocks else "preempted"
            self._mark(key, Mark(name, request.waiting_since))
        own = self._marks.get(key, [])
        known = None if times is None else (times.scheduled, times.first)
        if own or known is None:
            return _merged(times, own)
        # Most often nothing is new.
        life = self._before.get(key)
        if life is None or life[0] != known:
            life = known, _merged(times, ())
        self._lives[key] = life
        return life[1]

    def _mark(self, key: _Key, mark: Mark) -> None:
        """Remember a mark; of too many, those in the middle of a life are forgotten."""
        marks = self._marks.setdefault(key, [])
        marks.append(mark)
        if len(marks) > MOST_MARKS - 4:  # those of `_merged`
            del marks[len(marks) // 2]

    def _forget(self) -> None:
        """Forget the marks of choices that have ended."""
        for key in [key for key in self._marks if not self._lives_on(*key)]:
            del self._marks[key]

    def _lives_on(self, request_id: str, index: int) -> bool:
        return any(request.index == index for request in self._scheduler.choices(request_id))

    def _read_ended(self) -> None:
        """Rows of the requests that have ended since the last view."""
        recorder = self._engine.recorder
        for ended in _new(recorder.ended, recorder.num_ended - self._num_ended):
            self._ended.append(self._ended_row(ended))
        self._num_ended = recorder.num_ended

    def _ended_row(self, ended: EndedRequest) -> RequestRow:
        times, generated = ended.times, sum(ended.times.generated.values())
        marks = (*_merged(times, self._marks.get((ended.request_id, 0), ())),)
        last = self._rows.get(ended.request_id)
        return RequestRow(
            ended.request_id,
            0,
            "finished",
            times.prompt_tokens,
            generated,
            0 if last is None else last.computed,
            times.cached,
            times.max_tokens,
            times.priority,
            max(times.preemptions, 0 if last is None else last.preemptions),
            0,
            cast(FinishReason, ended.reason),
            (*marks[: MOST_MARKS - 1], Mark("finished", ended.at)),
        )

    # Changes.

    def _read_transitions(self) -> None:
        """Marks and changes of the preemptions since the last view."""
        queues = self._scheduler.queues
        for one in _new(queues.transitions, queues.num_transitions - self._num_transitions):
            name: MarkName = "resumed"
            if one.name != "resumed":
                name = "swapped" if one.swapped else "preempted"
            self._mark((one.request_id, one.index), Mark(name, one.at, one.tokens))
            other = one.other.partition("#")[0]
            self._change(one.name, one.at, _sentence(one), one.request_id, other)
        self._num_transitions = queues.num_transitions

    def _read_policy(self, queue: Queue, now: float) -> None:
        """A change where the policy says that its budget has changed, or why it has."""
        policy = self._scheduler.policy
        state = getattr(policy, "state", None)
        key = getattr(state, "changes", None), "" if state is None else queue.reason
        said = key[:1] if key[0] is not None else key
        if self._policy is not None and said != self._policy:
            text = f"{policy.name}: {queue.reason or 'its state changed'}"
            tokens, sequences = queue.step_tokens, queue.step_sequences
            text += f"; a step may compute {tokens} tokens and {sequences} requests may run"
            self._change("policy", now, text)
        self._policy = said

    def _read_hold(self, queue: Queue, now: float) -> None:
        """A change where waiting requests are kept from starting by something else than before."""
        if queue.hold is not None and queue.hold != self._hold:
            self._change("admission", now, queue.hold_text)
        if queue.hold is not None or not self._scheduler.queues.waiting:
            self._hold = queue.hold

    def _change(
        self, name: ChangeName, at: float, text: str, request: str = "", other: str = ""
    ) -> None:
        self._num_changes += 1
        self._changes.append(Change(self._num_changes, at, name, text, request, other))

    # The scheduler.

    def _queue(self, now: float) -> Queue:
        scheduler = self._scheduler
        queues = scheduler.queues
        preempted = sum([request.status is Status.PREEMPTED for request in queues.waiting])
        swapped = scheduler.num_swapped
        tokens, sequences, _ = scheduler.last_budget
        hold, text = _hold(scheduler)
        return Queue(
            scheduler.num_steps,
            len(queues.running),
            len(queues.waiting) - preempted - swapped,
            swapped,
            preempted,
            tokens,
            sequences,
            hold,
            text,
            str(getattr(getattr(scheduler.policy, "state", None), "reason", "")),
            {gauge.name: gauge.value for gauge in scheduler.fallback.gauges()},
        )


def _live(scheduler: Scheduler) -> Iterator[Request]:
    """Running choices first, then swapped, preempted, waiting ones."""
    yield from scheduler.queues.running
    for status in (Status.SWAPPED, Status.PREEMPTED, Status.WAITING):
        for request in scheduler.queues.waiting:
            if request.status is status:
                yield request


def _new(items: "deque[T]", count: int) -> Iterable[T]:
    """The last `count` ones, as far as they are remembered."""
    return islice(items, max(len(items) - count, 0), None)


def _merged(times: RequestTimes | None, own: Iterable[Mark]) -> tuple[Mark, ...]:
    """The marks of a life in order: those that the recorder knows, and others."""
    marks = list(own)
    if times is not None:
        marks.append(Mark("arrived", times.arrival))
        if times.scheduled is not None:
            marks.append(Mark("planned", times.scheduled))
        if times.first is not None:
            marks.append(Mark("first_token", times.first))
    marks.sort(key=_at)
    return tuple(marks)


def _at(mark: Mark) -> float:
    return mark.at


def _sentence(one: Transition) -> str:
    name = choice_id(one.request_id, one.index)
    if one.name == "resumed":
        return f"{name} runs again"
    where = "its blocks were copied to the host" if one.swapped else "it will be computed again"
    if one.name == "displaced":
        return f"{name} was displaced by {one.other}, which is more urgent; {where}"
    if one.other == name:
        return f"{name} was preempted: it needed a block and none was free; {where}"
    return f"{name} was preempted: {one.other} needed a block and none was free; {where}"


def _hold(scheduler: Scheduler) -> tuple[Hold | None, str]:
    """What keeps the first waiting request from starting, as a word and as a sentence."""
    queues, kv = scheduler.queues, scheduler.kv
    first = next(iter(queues.waiting), None)
    if first is None:
        return None, ""
    running, count = len(queues.running), len(queues.waiting)
    waiting = "1 request waits" if count == 1 else f"{count} requests wait"
    tokens, sequences, planned = scheduler.last_budget
    if running >= scheduler.max_num_seqs:
        return "max_num_seqs", f"{waiting}: {running} run, as many as max_num_seqs allows"
    if running >= sequences > 0:
        return "policy", f"{waiting}: {running} run, as many as the policy allows now"
    spare = sum([kv.missing(request) for request in queues.running if request.lag > 1])
    spare += running * kv.num_groups
    short = kv.shortage(first, kv.find(first), spare if running else 0)
    if short > 0:
        free = kv.pool.num_free
        text = f"{waiting}: {first.seq_id} needs {short} more free blocks than the {free} there are"
        return "memory", f"{text}, of which {spare} are kept for running requests"
    if tokens and planned >= tokens:
        return "tokens", f"{waiting}: the {tokens} tokens of a step are used up by others"
    return None, ""
