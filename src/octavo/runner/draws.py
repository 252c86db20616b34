"""Draws that a device makes while the host goes on, for devices that draw ahead.

What `runner.sampler` computes in one call is here in two: a step's draws are launched behind the
step, their tokens stay on the device, where the next step finds them, and the host reads them
later. The results are those of the sampler.
"""

from collections.abc import Callable, Sequence

import torch

from octavo.core.plan import SampleSpec, TokenLogprobs
from octavo.errors import EngineError
from octavo.kernels.sampling import Items, Logprobs
from octavo.runner import sampler
from octavo.runner.device import DrawsAhead
from octavo.runner.sampler import Sampled

PromptLogprobs = Callable[[], tuple[TokenLogprobs, ...]]


class Draws:
    """The draws of one step, in the order of its samples."""

    def __init__(self, device: DrawsAhead) -> None:
        self._device = device
        self._batches: list[_Batch] = []

    def launch(
        self, logits: torch.Tensor, specs: Sequence[SampleSpec], rows: Sequence[int] | None = None
    ) -> None:
        """Draw a token for each spec, after those before; see `sampler.sample`."""
        self._batches.append(_Batch(self._device, logits, specs, rows))

    def tokens(self) -> torch.Tensor | None:
        """int64 [draws, 2] on the device: the token and status of each; None without draws."""
        launched = [batch.drawn for batch in self._batches]
        return torch.cat(launched) if len(launched) > 1 else launched[0] if launched else None

    def read(self) -> list[Sampled]:
        """Wait for the results."""
        return [drawn for batch in self._batches for drawn in batch.read()]


class _Batch:
    """The draws from one tensor of logits."""

    def __init__(
        self,
        device: DrawsAhead,
        logits: torch.Tensor,
        specs: Sequence[SampleSpec],
        rows: Sequence[int] | None,
    ) -> None:
        table = sampler.for_kernels(logits)
        self._specs = specs
        self._items, plain = sampler.items_of(specs, rows)
        self._errors: dict[int, EngineError] = {}
        self._asking: list[int] = []
        self._logprobs: tuple[Items, Callable[[], Logprobs]] | None = None
        if plain or not any(sampler.adjusts(spec) for spec in specs):
            self.drawn = device.launch_draws(table, self._items)
        else:
            edited = sampler.edited_rows(
                device, table, specs, self._items, self._errors, device.tensor
            )
            parts = [device.launch_draws(copies, items) for _, copies, items in edited]
            self.drawn = torch.cat(parts) if len(parts) > 1 else parts[0]
        self._read = device.fetch(self.drawn)
        if not plain:
            self._asking = [n for n, spec in enumerate(specs) if spec.params.logprobs is not None]
        if self._asking:
            wanted = sampler.logprob_items(specs, self._items, self._asking, table.shape[1])
            wanted["token"] = self._asking
            table = sampler.masked(table, specs, self._asking, wanted, device.tensor)
            self._logprobs = (wanted, device.launch_logprobs(table, wanted, self.drawn))

    def read(self) -> list[Sampled]:
        """Wait for the results."""
        drawn = self._read()
        self._items["token"], self._items["status"] = drawn[:, 0], drawn[:, 1]
        found: dict[int, TokenLogprobs] = {}
        if self._logprobs:
            wanted, read = self._logprobs
            values = read()
            wanted["token"] = self._items["token"][self._asking]
            found = {
                n: sampler.possible(entry, self._specs[n])
                for n, entry in zip(
                    self._asking, sampler.token_logprobs(wanted, values), strict=True
                )
            }
        return sampler.sampled(self._specs, self._items, self._errors, found)


def launch_prompt_logprobs(
    device: DrawsAhead, logits: torch.Tensor, targets: Sequence[int], k: int
) -> PromptLogprobs:
    """`sampler.prompt_logprobs`, which the answer waits for."""
    table = sampler.for_kernels(logits)
    items = sampler.target_items(targets, k, table.shape[1])
    read = device.launch_logprobs(table, items)
    return lambda: tuple(sampler.token_logprobs(items, read()))
