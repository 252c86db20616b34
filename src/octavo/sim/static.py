"""Static batching over contiguous memory: what paged, continuous batching is compared with.

Every request reserves KV for the longest request that may come. As many as have such a place are
a batch: it is taken from those that wait when the one before has ended, it is computed until its
longest answer is complete, and all its answers are complete then. The same requests, the same
cost of a step, the same memory as in `sim.simulation`; no scheduler, no blocks.
"""

from collections import deque
from collections.abc import Sequence

from octavo.core.plan import RunnerLimits
from octavo.sim.cost import StepCost, StepShape
from octavo.sim.record import Record
from octavo.sim.requests import Job


class StaticBatching:
    """Runs `jobs`, which are sorted by arrival, to their end; used once.

    max_num_seqs: requests of a batch at most; max_concurrency: as in `Simulation`.
    """

    def __init__(
        self,
        limits: RunnerLimits,
        max_num_seqs: int,
        cost: StepCost,
        jobs: Sequence[Job],
        max_concurrency: int | None = None,
    ) -> None:
        self.places = max(1, min(max_num_seqs, limits.kv_tokens // limits.max_model_len))
        self.record = Record(total_slots=limits.kv_tokens)
        self._reserved = limits.max_model_len
        self._cost = cost
        self._jobs = jobs
        self._next = 0
        self._max_concurrency = max_concurrency or len(jobs)
        self._waiting: deque[tuple[float, Job]] = deque()
        self._in_flight = 0  # in the last batch
        self._now = 0.0

    def run(self) -> Record:
        """Until every request has ended or was refused."""
        if self._jobs:
            self._now = self.record.started_at = self._jobs[0].arrival
        while self._next < len(self._jobs) or self._waiting:
            self._deliver()
            if self._waiting:
                self._in_flight = min(self.places, len(self._waiting))
                self._batch([self._waiting.popleft() for _ in range(self._in_flight)])
            elif self._next < len(self._jobs):
                self._in_flight = 0
                self._now = max(self._now, self._jobs[self._next].arrival)
        return self.record

    def _deliver(self) -> None:
        """Let what has arrived wait. Beside the batch that has just ended, the client had only so
        many in flight; the others are sent now."""
        early = self._max_concurrency - self._in_flight - len(self._waiting)
        while self._next < len(self._jobs) and len(self._waiting) < self._max_concurrency:
            job = self._jobs[self._next]
            if job.arrival > self._now:
                break
            self._next += 1
            if job.prompt_len + job.output_len > self._reserved:
                self.record.refuse(f"longer than max_model_len ({self._reserved})")
                continue
            self._waiting.append((job.arrival if early > 0 else self._now, job))
            early -= 1

    def _batch(self, batch: list[tuple[float, Job]]) -> None:
        """Prefill, then one token for every row until the last answer is complete."""
        prompts = [job.prompt_len for _, job in batch]
        outputs = sorted(job.output_len for _, job in batch)
        count, read = len(batch), sum(prompts)
        written = read  # without what is computed after an answer's end
        pairs = sum(length * (length + 1) // 2 for length in prompts)
        self._step(StepShape(read, count, 0, read, pairs, count, False, 0), read)
        started, ends, done = self._now, [self._now], 0
        for step in range(1, outputs[-1]):
            while outputs[done] <= step:
                done += 1
            read += count
            written += count - done
            before = self._now
            self._step(StepShape(count, count, read, 0, 0, count, True, 0), written)
            ends.append(self._now)
            self.record.gap(self._now - before, count - done)
        for sent, job in batch:
            last = ends[job.output_len - 1]
            self.record.end(sent, started, last, job.prompt_len, job.output_len, self._now)

    def _step(self, shape: StepShape, written: int) -> None:
        seconds = self._cost.seconds(shape)
        held = shape.sequences * self._reserved
        self.record.step(seconds, shape.sequences, held, held - written)
        record = self.record
        record.most_running = max(record.most_running, shape.sequences)
        record.most_held = max(record.most_held, held)
        record.most_written = max(record.most_written, written)
        self._now += seconds
