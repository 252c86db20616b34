"""The executor of a model that several ranks compute together.

Rank 0 is in this process: it gives every plan to the others, executes it like them, and has the
results. How the others are watched, and what ends them, is `engine.workers`.
"""

import contextlib
import os
import secrets
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from octavo import devices
from octavo.config import EngineConfig
from octavo.core.plan import StepPlan, StepResult, draws
from octavo.core.plan import resolved as resolved_rows
from octavo.dist.base import Group
from octavo.dist.create import create_group
from octavo.engine.worker_launcher import LocalWorkers, Place, WorkerLauncher
from octavo.engine.worker_messages import RUNNER, WorkerLaunch
from octavo.engine.workers import Limits, Workers
from octavo.errors import ConfigError
from octavo.log import get_logger
from octavo.runner.ranks import Ranks

logger = get_logger(__name__)


class TensorParallelExecutor:
    """See `engine.executor.Executor`. Raises ConfigError or EngineError when it cannot start.

    Whatever ends it (`close`, deletion, an error, the end of this process) ends the workers.
    """

    def __init__(
        self,
        config: EngineConfig,
        launcher: WorkerLauncher | None = None,
        limits: Limits | None = None,
        runner: str = RUNNER,
        owns_process: bool = False,
    ) -> None:
        """launcher: where the workers run, by default on this machine. runner: what they execute
        plans with, as `module:name`. owns_process: this process, too, is bound to its share of the
        processors; that of a program with other work is not."""
        # Imported late: it brings in torch.
        from octavo.runner.device import resolved
        from octavo.runner.model_runner import ModelRunner

        config = resolved(config)
        _check_device(config)
        launcher = launcher or LocalWorkers(config)
        self._drawn: list[int] = []  # in the last step, where the workers draw nothing
        self._workers = workers = Workers(launcher, limits)
        self._end = weakref.finalize(self, workers.close)
        try:
            start = _Start(config, launcher, workers, runner)
            if owns_process and start.place.processors:
                os.sched_setaffinity(0, start.place.processors)
            self._runner: ModelRunner = ModelRunner(start.config_of(start.place), start.ranks)
            workers.wait_until_loaded(self._runner.draws_everywhere)
        except BaseException as error:
            self._give_up(error)
            raise
        self.limits, self.runs_ahead = self._runner.limits, self._runner.runs_ahead
        logger.info("tensor parallel: %s", self.explain()["tensor parallel"])

    @property
    def failure_fd(self) -> int:
        """See `engine.executor.FailsIdle`."""
        return self._workers.failure_fd

    def check(self) -> None:
        """See `engine.executor.FailsIdle`."""
        self._workers.check()

    def execute(self, plan: StepPlan) -> StepResult:
        return self.submit(plan)()

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """See `engine.executor.Executor`. Where the device does not work beside the host, the step
        is computed here: the other ranks wait for this one within it."""
        with self._guarded():
            if self._runner.draws_everywhere:
                self._workers.send(plan)
                return partial(self._result, self._runner.submit(plan))
            plan = msgspec.structs.replace(plan, rows=resolved_rows(plan.rows, self._drawn))
            self._workers.send(plan)
            result = self._runner.execute(plan)
            self._drawn = draws(plan.rows, result.rows)
            return lambda: result

    def _result(self, result: Callable[[], StepResult]) -> StepResult:
        with self._guarded():
            return result()

    def explain(self) -> dict[str, str]:
        return self._runner.explain()

    def close(self) -> None:
        """Release the memory, and end the workers. May be repeated."""
        if "_runner" in vars(self):
            self._runner.close()
        self._workers.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """What rank 0 does in a step. An error of any rank ends all of them."""
        self._workers.check()
        try:
            with self._workers.running():
                yield
                self._workers.check()  # a device may end a wait without an error
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """End the workers after an error, and raise what was behind it, if that is another."""
        cause = self._workers.cause_of(error) if isinstance(error, Exception) else error
        self._workers.close(kill=True)
        if cause is not error:
            raise cause from error


class _Start:
    """What the ranks of one engine are told."""

    def __init__(
        self, config: EngineConfig, launcher: WorkerLauncher, workers: Workers, runner: str
    ) -> None:
        self._runner = runner
        self.place = launcher.place(0)
        self._config, self._launcher, self._workers = config, launcher, workers
        self._size = config.tensor_parallel_size
        self._engine = secrets.token_hex(8)
        self.ranks = Ranks(0, self._size, self.place.here, self._engine, self._connect)

    def config_of(self, place: Place) -> EngineConfig:
        """The configuration of the rank at `place`."""
        return self._config.with_(device=place.device, threads=place.threads)

    def _connect(self, device: str) -> Group:
        """Start the workers, and meet them. Called once rank 0 has found nothing wrong."""
        places = {rank: self._launcher.place(rank) for rank in range(1, self._size)}
        self._workers.start({r: (self._launch(r, place), place) for r, place in places.items()})
        meeting = self.place.meeting
        return self._workers.meet(lambda: create_group(meeting, 0, self._size, device))

    def _launch(self, rank: int, place: Place) -> WorkerLaunch:
        plans, reports = self._workers.addresses
        return WorkerLaunch(
            self.config_of(place), rank, self._size, place.here, place.meeting, plans, reports,
            self._engine, self._runner,
        )  # fmt: skip


def _check_device(config: EngineConfig) -> None:
    """Raise ConfigError for a device that ranks cannot have one each of."""
    size, device = config.tensor_parallel_size, config.device
    if devices.kind(device) not in ("cpu", "cuda"):
        raise ConfigError(
            f"tensor_parallel_size={size} needs device 'cpu' or 'cuda', not {device!r}"
        )
    if devices.kind(device) != device:
        raise ConfigError(
            f"device={device!r} is one GPU, and tensor_parallel_size={size} takes {size}: set "
            "device='cuda', and choose GPUs by CUDA_VISIBLE_DEVICES"
        )
