"""Runs plans: in this process, or with others as tensor-parallel ranks.

An executor owns the runner. The engine depends only on this interface, so that engine, scheduler
and server can be tested without weights (`engine.fake`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from octavo import progress
from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits, StepPlan, StepResult
from octavo.engine.interrupts import interrupts_deferred
from octavo.engine.preflight import check_names, check_options
from octavo.log import get_logger

if TYPE_CHECKING:
    from octavo.engine.worker_launcher import WorkerLauncher

logger = get_logger(__name__)

_FEW_TOKENS = 32  # a step of fewer takes hardly less time than one of this many


class Executor(Protocol):
    """Runs plans. Created with the model loaded, so `limits` are known.

    runs_ahead: whether the next step should be planned while one is computed, unless the
    configuration says otherwise: where the device works beside the host.
    """

    limits: RunnerLimits
    runs_ahead: bool

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step. An exception ends the engine; an error of one row is in its result."""
        ...

    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step, after those submitted before. Returns what waits for its result.

        Its rows may take tokens that the step submitted before draws. A result may be asked for
        after the next step was submitted, or never.
        """
        ...

    def explain(self) -> dict[str, str]:
        """What implements each operation, and why: for the log and for diagnosis."""
        ...

    def close(self) -> None:
        """Release the memory. The executor cannot be used afterwards."""
        ...


@runtime_checkable
class FailsIdle(Protocol):
    """Optional interface of an executor that may fail while it computes nothing."""

    @property
    def failure_fd(self) -> int:
        """A descriptor that is readable once it has failed."""
        ...

    def check(self) -> None:
        """Raise why it has failed, if it has."""
        ...


def create_process_executor(config: EngineConfig) -> Executor:
    """As `create_executor`, in a process that has nothing else to do."""
    return create_executor(config, owns_process=True)


def create_executor(config: EngineConfig, owns_process: bool = False) -> Executor:
    """Load the model where `config` says. Raises ConfigError when it cannot be set up.

    owns_process: this process may be bound to some of its processors.
    """
    check_options(config)
    _warn_of_small_steps(config)
    # Ctrl-C within an import leaves a module half made, or ends the process in torch's own code.
    with progress.phase(f"opening {config.model}"), interrupts_deferred():
        check_names(config)
        # Imported late: the rest of this module works without torch.
        from octavo.engine.tensor_parallel import TensorParallelExecutor
        from octavo.runner.model_runner import ModelRunner

    if config.tensor_parallel_size > 1:
        return TensorParallelExecutor(config, _launcher_of(config), owns_process=owns_process)
    return ModelRunner(config)


def _launcher_of(config: EngineConfig) -> "WorkerLauncher | None":
    """Where the other ranks run, if that is not this machine."""
    if config.distributed_executor_backend != "ray":
        return None
    from octavo.engine.ray_workers import RayWorkers
    from octavo.runner.device import resolved

    return RayWorkers(resolved(config))


def _warn_of_small_steps(config: EngineConfig) -> None:
    most, seats = config.max_num_batched_tokens, config.max_num_seqs
    if most < max(seats, _FEW_TOKENS):
        logger.warning(
            "max_num_batched_tokens is %d: a step computes no more tokens than that, so a prompt "
            "of 1000 takes %d steps, and of max_num_seqs=%d running requests at most %d gain a "
            "token in a step; the default is 2048", most, -(-1000 // most), seats, min(most, seats),
        )  # fmt: skip
