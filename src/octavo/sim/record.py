"""What happened in a simulation, step by step, in as little memory as a million requests allow."""

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """Times in seconds.

    firsts, latencies: of each request that ended, to its first token and to its last, and
    per_token the mean between its tokens, in the order of their ends. gaps: between consecutive
    tokens of one request; gap_counts: of how many. busy: the time of all steps; the next three are
    sums over it, weighted by the length of each step: requests running, blocks held, and slots
    held but not written. refused: requests that never ran, by reason.
    """

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
    held_blocks: float = 0.0
    unwritten_slots: float = 0.0
    most_running: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def step(self, seconds: float, running: int, blocks: int, unwritten: int) -> None:
        """A step of `seconds`."""
        self.steps += 1
        self.busy += seconds
        self.running += seconds * running
        self.held_blocks += seconds * blocks
        self.unwritten_slots += seconds * unwritten

    def gap(self, seconds: float, count: int = 1) -> None:
        """`count` requests gained a token so long after the one before it."""
        self.gaps.append(seconds)
        self.gap_counts.append(count)

    def end(self, arrived: float, first: float, last: float, prompt: int, output: int) -> None:
        """A request ended."""
        self.firsts.append(first - arrived)
        self.latencies.append(last - arrived)
        if output > 1:
            self.per_token.append((last - first) / (output - 1))
        self.prompt_tokens += prompt
        self.output_tokens += output
        self.ended_at = max(self.ended_at, last)

    def refuse(self, reason: str) -> None:
        """A request never ran."""
        self.refused[reason] = self.refused.get(reason, 0) + 1
