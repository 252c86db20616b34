"""A device that works beside the host, played by the CPU: what a GPU does late is done late.

Kernels run at once, but a copy to the device counts as in flight, and a copy to the host is not
made, until the host waits for a later result. Then the memory of the former is poisoned. So these
faults fail, which on a GPU would now and then give a wrong token:

- host memory that is written while a copy reads it, or is read without waiting for a copy;
- a wait for the results of a step before the next one was launched (`watch`).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tests.engine.test_engine_overlap import Workload
from tests.runner.accelerator import FakeAccelerator

from octavo.config import EngineConfig
from octavo.core.policy_registry import create_policy
from octavo.engine.engine import Engine
from octavo.kernels.gpu import sampling_call
from octavo.kernels.gpu.staging import HostCopies, Staging
from octavo.runner.model_runner import ModelRunner

POISON = 0xA5


@dataclass
class LateEvent:
    """Of a copy. done: what is to be done with host memory when the device is done with it.
    place: on the device, of an input; 0 of a result."""

    copies: "LateCopies"
    number: int
    done: Callable[[], object]
    place: int = 0

    def query(self) -> bool:
        return self.number <= self.copies.completed

    def synchronize(self) -> None:
        if self.query():
            return
        assert not self.place or self.copies.loading, "the host waits for a copy to the device"
        if not self.place:
            self.copies.waiting()
        self.copies.complete(self.number)


class LateCopies(HostCopies):
    """Copies in the order of the device's work; those before a result are done with it."""

    def __init__(self) -> None:
        self.completed = self.issued = 0
        self.in_flight: list[LateEvent] = []
        self.waiting: Callable[[], None] = lambda: None
        self.loading = False  # when the host may wait for copies to the device
        self.most = 0  # copies to the device of one input in flight

    def send(self, host: torch.Tensor, target: torch.Tensor) -> LateEvent:
        sent = host.clone()
        target.copy_(host)

        def done() -> None:
            assert torch.equal(host, sent), "written while a copy reads it"
            host.fill_(POISON)

        event = self._issue(done, target.data_ptr())
        count = sum(other.place == event.place for other in self.in_flight)
        self.most = max(self.most, count)
        return event

    def fetch(self, source: torch.Tensor, host: torch.Tensor) -> LateEvent:
        found = source.clone()
        host.fill_(POISON)
        return self._issue(lambda: host.copy_(found))

    def _issue(self, done: Callable[[], object], place: int = 0) -> LateEvent:
        self.issued += 1
        event = LateEvent(self, self.issued, done, place)
        self.in_flight.append(event)
        return event

    @torch.inference_mode()
    def complete(self, number: int) -> None:
        self.completed = max(self.completed, number)
        while self.in_flight and self.in_flight[0].number <= number:
            self.in_flight.pop(0).done()


class Asynchronous(FakeAccelerator):
    """An `octavo.runner.device.DrawsAhead`."""

    name = "asynchronous"

    def __init__(self, config):
        super().__init__(config)
        self.copies = LateCopies()
        self.staging = Staging(self.copies)
        self.taken = 0  # steps that took tokens on the device

    def tensor(self, name, array):
        return self.tensors(name, [array])[0]

    def tensors(self, name, arrays):
        if name == "inputs":
            super().tensor("token_ids", arrays[0])
        return self.staging.send(name, arrays)

    def fetch(self, tensor):
        return self.staging.fetch(tensor)

    def launch_draws(self, logits, items):
        drawn = items.copy()
        self.draw(logits, drawn)
        return torch.from_numpy(np.stack((drawn["token"], drawn["status"]), 1))

    def launch_logprobs(self, logits, items, drawn=None):
        found = self.fetch(sampling_call.submit_logprobs(self.tensor, logits, items, drawn))
        return lambda: sampling_call.unpacked(found(), items)

    def edited(self, logits, rows, closed, edits):
        return sampling_call.edited(self.tensor, logits, rows, closed, edits)

    def take_drawn(self, token_ids, drawn):
        missing = token_ids < 0
        token_ids[missing] = drawn[-1 - token_ids[missing], 0].clamp(min=0)
        self.taken += 1


def engine_of(runner: ModelRunner, workload: Workload, **options: Any) -> Engine:
    """An engine over a runner that has more memory than the workload wants."""
    options = workload.options | {"block_size": 8} | options
    blocks, host = options.pop("blocks"), options.pop("host")
    limits = dataclasses.replace(
        runner.limits, num_blocks=blocks, num_host_blocks=host, max_model_len=workload.window,
        eos_token_ids=(2,),
    )  # fmt: skip
    config = EngineConfig(**options)
    return Engine(config, View(runner, limits), create_policy(config.scheduler))


class View:
    """A runner with limits of its own."""

    def __init__(self, runner, limits):
        self._runner, self.limits = runner, limits
        self.runs_ahead = runner.runs_ahead
        self.execute, self.submit = runner.execute, runner.submit
        self.explain = runner.explain

    def close(self):
        pass


def watch(engine: Engine, runner: ModelRunner, copies: LateCopies) -> None:
    """From now on fail where the host waits for a result while it could launch the next step."""
    submit, launch, state = ModelRunner.submit, ModelRunner._launch, []

    def watched_submit(plan):
        state.append("building")
        try:
            return submit(runner, plan)
        finally:
            state.clear()

    def watched_launch(*arguments):
        found = launch(runner, *arguments)
        state.append("launched")
        return found

    def waiting() -> None:
        if state:  # penalties look at the last token, once the step is launched
            assert state[-1] == "launched", "a result is awaited before the next step is launched"
            return
        ahead = len(engine._submitted) == 2 or not engine.scheduler.may_plan_ahead
        assert ahead, "a result is awaited before the next step is planned"

    engine.executor.submit = watched_submit
    runner._launch, copies.waiting = watched_launch, waiting
