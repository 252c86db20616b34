"""The running and waiting queues, and the transitions of requests between them.

A preempted request gives up its blocks: they are swapped out to the host, or recomputed later.
Which request runs, and when, is decided elsewhere (`step`, `scheduler`).
"""

from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Literal

import msgspec

from octavo.core.block_pool import expect
from octavo.core.kv_manager import KVManager
from octavo.core.rates import Rates
from octavo.core.request import Request, Status

PreemptionMode = Literal["auto", "swap", "recompute"]

MOST_TRANSITIONS = 256  # that are remembered


class Transition(msgspec.Struct, frozen=True, gc=False):
    """Why a running request stopped, or that it runs again; for whoever watches.

    preempted: for memory; displaced: by a more urgent request; resumed: it runs again. request_id,
    index: the choice; tokens: that it had computed. other: the choice that needed its blocks,
    itself if no other could give any. swapped: its blocks were, or are, on the host.
    """

    name: Literal["preempted", "displaced", "resumed"]
    at: float
    request_id: str
    index: int
    tokens: int
    other: str
    swapped: bool


class Queues:
    """running: in the order in which they started. waiting: preempted and resumed requests first,
    then by arrival. Sets are dicts, since their order matters.

    preemption_mode: what `preempt` does with the KV of a request; auto chooses what is expected
    to be faster, by `rates`. transitions: the last ones; num_transitions: all so far.
    """

    def __init__(self, kv: KVManager, rates: Rates, preemption_mode: PreemptionMode) -> None:
        self.kv = kv
        self.rates = rates
        self.preemption_mode = preemption_mode
        self.running: dict[Request, None] = {}
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        self.num_preemptions = 0  # for memory and by displacement
        self.num_displaced = 0
        self.num_swap_outs = 0
        self.peak_running = 0
        self.transitions: deque[Transition] = deque(maxlen=MOST_TRANSITIONS)
        self.num_transitions = 0

    def enqueue(self, request: Request) -> None:
        self.waiting[request] = None

    def enqueue_resumed(self, request: Request) -> None:
        """Queue a request that another engine has accepted: after those that were preempted or
        resumed before, ahead of new ones. With output, it counts as preempted."""
        new = [
            other
            for other in self.waiting
            if other.status is Status.WAITING and other.submission.continuation is None
        ]
        if request.num_output_tokens:
            request.status = Status.PREEMPTED
        self.waiting[request] = None
        for other in new:
            self.waiting.move_to_end(other)

    def run(self, request: Request) -> None:
        """Move `request` to the running ones; it has its blocks already."""
        self.waiting.pop(request, None)
        request.status = Status.RUNNING
        self.running[request] = None
        self.peak_running = max(self.peak_running, len(self.running))

    def remove(self, request: Request) -> None:
        self.running.pop(request, None)
        self.waiting.pop(request, None)

    def preempt(self, request: Request, now: float, other: Request) -> None:
        """Preempt a running request because `other`, which runs, needs its blocks."""
        self._preempt("preempted", request, now, other)

    def displace(self, request: Request, now: float, other: Request) -> None:
        """Preempt a running request in favour of `other`, which waits."""
        num_tokens, times = request.displaced
        again = num_tokens == len(request.tokens)
        request.displaced = len(request.tokens), times + 1 if again else 1
        self.num_displaced += 1
        self._preempt("displaced", request, now, other)

    def resume(self, request: Request, now: float) -> None:
        """`run` a request that was preempted."""
        swapped = request.status is Status.SWAPPED
        self._note("resumed", request, now, request, swapped, request.num_computed)
        self.run(request)

    def _preempt(
        self, name: Literal["preempted", "displaced"], request: Request, now: float, other: Request
    ) -> None:
        self.num_preemptions += 1
        request.num_preemptions += 1
        computed = request.num_computed
        self.requeue(request, now)
        self._note(name, request, now, other, request.status is Status.SWAPPED, computed)

    def _note(
        self,
        name: Literal["preempted", "displaced", "resumed"],
        request: Request,
        now: float,
        other: Request,
        swapped: bool,
        tokens: int,
    ) -> None:
        self.num_transitions += 1
        self.transitions.append(
            Transition(name, now, request.request_id, request.index, tokens, other.seq_id, swapped)
        )

    def requeue(self, request: Request, now: float) -> None:
        """Release all blocks of a running request; it waits ahead of those that never ran."""
        if self._prefers_swap(request) and self.kv.swap_out(request):
            request.status = Status.SWAPPED
            self.num_swap_outs += 1
        else:
            self.kv.free(request)
            request.status = Status.PREEMPTED
        self.running.pop(request, None)
        request.waiting_since = now
        self.waiting[request] = None
        self.waiting.move_to_end(request, last=False)

    def check(self, live: Collection[Request]) -> None:
        """Verify that the queues hold exactly the `live` requests; raises EngineError."""
        expect(self.running.keys() | self.waiting.keys() == live, "a live request has no queue")
        expect(not self.running.keys() & self.waiting.keys(), "a request is in both queues")
        for request in live:
            running = request.status is Status.RUNNING
            expect(running == (request in self.running), "{!r} is in the wrong queue", request)
            expect(running or not len(request.table), "{!r} waits and holds blocks", request)
            expect(running or not request.num_in_flight, "{!r} waits and is in flight", request)
            swapped = request.status is Status.SWAPPED
            expect(swapped == bool(request.host_blocks), "{!r} has a wrong status", request)

    def _prefers_swap(self, request: Request) -> bool:
        if self.preemption_mode == "recompute" or not request.num_computed:
            return False
        if self.preemption_mode == "swap":
            return True
        tokens, blocks = self.kv.preemption_cost(request)
        token, block = self.rates.token_seconds, self.rates.block_seconds
        if token is None or block is None:
            return tokens > 0  # swap once, to measure its cost
        return blocks * block < tokens * token
