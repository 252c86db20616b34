"""What happened in a simulation, step by step, in as little memory as a million requests allow."""

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """Times in seconds, memory in slots: places of a token in the layers of one KV group.

    firsts, latencies: of each request that ended, to its first token and to its end; per_token:
    the mean between its tokens; in the order of the ends. gaps: between consecutive tokens of one
    request; gap_counts: of how many. busy: the time of all steps; running, held, unwritten: sums
    over it of requests that run, slots that they hold, and those of them without a token, each
    weighted by the length of the step. most_*: at most. recomputed, swapped: preemptions, by what
    became of the KV; displaced: how many of them made room for a more urgent request. refused:
    requests that never ran, by reason.
    """

    total_slots: int = 0
    firsts: "array[float]" = field(default_factory=lambda: array("d"))
    latencies: "array[float]" = field(default_factory=lambda: array("d"))
    per_token: "array[float]" = field(default_factory=lambda: array("d"))
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    gap_counts: "array[int]" = field(default_factory=lambda: array("q"))
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    steps: int = 0
    busy: float = 0.0
    running: float = 0.0
    held: float = 0.0
    unwritten: float = 0.0
    most_running: int = 0
    most_held: int = 0
    most_written: int = 0
    recomputed: int = 0
    swapped: int = 0
    displaced: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def step(self, seconds: float, running: int, held: int, unwritten: int) -> None:
        """A step of `seconds`."""
        self.steps += 1
        self.busy += seconds
        self.running += seconds * running
        self.held += seconds * held
        self.unwritten += seconds * unwritten

    def gap(self, seconds: float, count: int = 1) -> None:
        """`count` requests gained a token so long after the one before it."""
        self.gaps.append(seconds)
        self.gap_counts.append(count)

    def end(
        self, arrived: float, first: float, last: float, prompt: int, output: int, end: float
    ) -> None:
        """A request ended. first, last: when it gained these tokens; end: when its caller has
        the whole answer."""
        self.firsts.append(first - arrived)
        self.latencies.append(end - arrived)
        if output > 1:
            self.per_token.append((last - first) / (output - 1))
        self.prompt_tokens += prompt
        self.output_tokens += output
        self.ended_at = max(self.ended_at, end)

    def refuse(self, reason: str) -> None:
        """A request never ran."""
        self.refused[reason] = self.refused.get(reason, 0) + 1
