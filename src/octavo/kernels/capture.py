"""How a device captures a step of the model, and replays it for other steps without Python.

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
    """One captured run of a model's layers."""

    def replay(self, num_tokens: int) -> torch.Tensor:
        """Run on the current contents of the inputs, for at least their first `num_tokens` tokens.

        Returns their results [num_tokens, H], valid until the next replay.
        """
        ...


class StepCapture(Protocol):
    """The part of a device that captures steps."""

    @property
    def pads_steps(self) -> bool:
        """Whether a replay computes as many tokens as its capture; the caller pads the inputs."""
        ...

    def capture_sizes(self, max_tokens: int) -> Sequence[int]:
        """Numbers of tokens to capture, rising and at most `max_tokens`; none if it cannot."""
        ...

    def capture(self, run: Callable[[], torch.Tensor]) -> CapturedRun:
        """Run `run` once and capture it. The memory that it reads and writes must not move.

        Raises CaptureError if it contains something that cannot be replayed.
        """
        ...
