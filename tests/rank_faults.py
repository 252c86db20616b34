"""Runners of ranks above 0 that go wrong in a step on purpose; a worker finds them by name."""

import os
import signal
import time
from collections.abc import Callable

from octavo.config import EngineConfig
from octavo.core.plan import StepPlan, StepResult
from octavo.errors import ConfigError
from octavo.runner.model_runner import ModelRunner
from octavo.runner.ranks import Ranks

STEP = 3  # in which it happens


class Faulty(ModelRunner):
    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        if plan.step >= STEP:
            self.fail()
        return super().submit(plan)

    def fail(self) -> None:
        raise NotImplementedError


class Raises(Faulty):
    def fail(self) -> None:
        raise ValueError("a kernel that is not there")


class Sleeps(Faulty):
    """Rank 0 waits for it within a step, while its heartbeat goes on."""

    def fail(self) -> None:
        time.sleep(3600)


class Stops(Faulty):
    """All its threads stand still."""

    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


class Refuses(ModelRunner):
    def __init__(self, config: EngineConfig, ranks: Ranks) -> None:
        super().__init__(config, ranks)
        raise ConfigError("threads must be fewer here")
