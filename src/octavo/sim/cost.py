"""What a step costs: the interface between the simulation and models of devices.

A `StepShape` is all that a model learns of a step; the simulation derives it from the scheduler's
plan, and knows no device. The time of many like steps is the sum of theirs: a step at a time costs
a microsecond, and the clock of the simulation is then the same whether it skips or not.
"""

from typing import NamedTuple, Protocol


class StepShape(NamedTuple):
    """What one step computes.

    rows: tokens computed. samples: logit rows drawn. kv_read: tokens of KV that rows of one token
    read: the sum of their contexts, their own token included. prefill_tokens: tokens in rows of
    more than one. prefill_pairs: sum over those of the tokens that each attends to, itself
    included. sequences: rows of the plan. captured: whether a captured step may replay it, since
    each row is one token whose successor is drawn. swapped_blocks: blocks copied before it, to the
    host, back, or within the pool. kv_shared: of kv_read, tokens that another of those rows reads
    from the same blocks (a cached prefix), all but one reading of each: on a CPU such tokens are
    read once for all of them.
    """

    rows: int
    samples: int
    kv_read: int
    prefill_tokens: int
    prefill_pairs: int
    sequences: int
    captured: bool
    swapped_blocks: int
    kv_shared: int = 0


class StepCost(Protocol):
    """Seconds of a step, as a pure function of its shape."""

    def seconds(self, shape: StepShape) -> float:
        """The time from its plan to its result; above 0."""
        ...


class LinearCost(NamedTuple):
    """Fixed seconds per step, token, token of context read, and block copied; for tests."""

    step: float = 1e-3
    token: float = 1e-4
    read: float = 1e-7
    block: float = 1e-5

    def seconds(self, shape: StepShape) -> float:
        read = shape.kv_read + shape.prefill_pairs
        copies = self.block * shape.swapped_blocks
        return self.step + self.token * shape.rows + self.read * read + copies
