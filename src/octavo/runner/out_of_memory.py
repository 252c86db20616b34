"""What happens where a device is out of memory: at start an error that names the option to change,
later a step in parts.

The KV pool is allocated at start, so what a step may lack is memory for activations, which is in
proportion to its tokens. A smaller step helps, whereas preempting a request would free nothing on
the device. The rows of a plan do not read what others write, so parts give what the whole gives.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec

from octavo.core.plan import MOST_TOKENS, PlanRow, RowResult
from octavo.errors import EngineError, NotEnoughMemoryError, brief, counted
from octavo.log import get_logger
from octavo.runner.device import Accelerator, Device

logger = get_logger(__name__)

Rows = tuple[PlanRow, ...]
Results = tuple[RowResult, ...]
Compute = Callable[[Rows], Results]
T = TypeVar("T")


@contextlib.contextmanager
def at_start(device: Device, what: str, cure: str) -> Iterator[None]:
    """A context in which an accelerator without memory for `what` raises NotEnoughMemoryError."""
    try:
        yield
    except Exception as error:
        if not (isinstance(device, Accelerator) and device.is_out_of_memory(error)):
            raise
        raise NotEnoughMemoryError(
            f"device {device.name} has too little memory for {what} ({brief(error, 160)}); {cure}"
        ) from error


class Parts:
    """Computes the rows of steps. It keeps how many tokens were too many."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._most = MOST_TOKENS

    def __call__(self, compute: Compute, rows: Rows) -> Results:
        """The results of `compute`, called once or for each part.

        Raises EngineError if memory is too small for a single token.
        """
        if (results := self.whole(compute, rows)) is not None:
            return results
        count = sum(len(row.token_ids) for row in rows)
        first, second = halves(rows)
        if not first:
            raise EngineError(
                f"out of memory in a step of {counted(count, 'token')}; start with a lower "
                "gpu_memory_utilization, which leaves more memory to steps"
            )
        return joined(self(compute, first), self(compute, second))

    def whole(self, call: Callable[[Rows], T], rows: Rows) -> T | None:
        """`call(rows)`; None if the device was out of memory, or is known to be for so many."""
        count = sum(len(row.token_ids) for row in rows)
        if count > self._most:
            return None
        try:
            return call(rows)
        except Exception as error:
            if not self._device.is_out_of_memory(error):
                raise
        # Here the error is gone, and with it the frames that hold the step's tensors.
        self._device.release()
        self._most = max(1, count // 2)
        logger.warning(
            "out of memory in a step of %d tokens: steps of more than %d are now computed in "
            "parts; a lower gpu_memory_utilization, or max_num_batched_tokens=%d, avoids it",
            count, self._most, self._most,
        )  # fmt: skip
        return None


def halves(rows: Rows) -> tuple[Rows, Rows]:
    """Two parts of about as many tokens; the first is empty if there is nothing to divide.

    A row alone is divided before the tokens that it draws from.
    """
    if len(rows) > 1:
        half = sum(len(row.token_ids) for row in rows) / 2
        taken, at = 0, 0
        while at < len(rows) - 1 and (at == 0 or taken + len(rows[at].token_ids) <= half):
            taken += len(rows[at].token_ids)
            at += 1
        return rows[:at], rows[at:]
    (row,) = rows
    free = len(row.token_ids) - (row.num_drafts + 1 if row.samples else 0)
    at = min(free, len(row.token_ids) // 2)
    if at < 1:
        return (), rows
    first = msgspec.structs.replace(
        row, token_ids=row.token_ids[:at], samples=(), prompt_targets=row.prompt_targets[:at]
    )
    second = msgspec.structs.replace(
        row,
        token_ids=row.token_ids[at:],
        start=row.start + at,
        prompt_targets=row.prompt_targets[at:],
    )
    return (first,), (second,)


def joined(first: Results, second: Results) -> Results:
    """The results of `halves`; those of a divided row are one."""
    if first[-1].request_id != second[0].request_id:
        return first + second
    before, after = first[-1], second[0]
    whole = msgspec.structs.replace(
        after,
        prompt_logprobs=before.prompt_logprobs + after.prompt_logprobs,
        error=before.error or after.error,
        error_param=before.error_param if before.error else after.error_param,
    )
    return (*first[:-1], whole, *second[1:])
