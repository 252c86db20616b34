"""How a device captures a step of the model, to replay it for other steps without the interpreter.

A captured run reads its inputs from memory at fixed addresses, which the caller fills before each
replay (`runner.steps`). Two forms fit: one capture that is replayed for any number of tokens up
to its own, and a ladder of captures of several sizes, a step being padded to the next one.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class CaptureError(Exception):
    """A run that cannot be captured; the message says why."""


class CapturedRun(Protocol):
    """One run of a model's layers, as its device replays it."""

    def replay(self, num_tokens: int) -> torch.Tensor:
        """Run again on what the inputs hold now, at least on the first `num_tokens` tokens.

        Returns their results [num_tokens, H], valid until the next replay.
        """
        ...


class StepCapture(Protocol):
    """What a device offers to capture steps."""

    def capture_sizes(self, max_tokens: int) -> Sequence[int]:
        """Numbers of tokens to capture, rising and at most `max_tokens`; none if it cannot."""
        ...

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        """Run `run` once and capture it. What it reads and writes must stay where it is.

        Raises CaptureError if something of it cannot be replayed.
        """
        ...
