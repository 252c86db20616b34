"""Where a plan is run: in this process; later, on tensor-parallel ranks or on Ray.

An executor owns the runner. The engine sees only this contract, so that it, the scheduler and
the server are tested without weights (`engine.fake`).
"""

from typing import Protocol

from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits, StepPlan, StepResult
from octavo.errors import ConfigError


class Executor(Protocol):
    """Runs plans. Made with the model loaded, so `limits` are known."""

    limits: RunnerLimits

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step. An exception ends the engine; a row's own fault is in its result."""
        ...

    def explain(self) -> dict[str, str]:
        """What computes each operation, and why: for the log and for diagnosis."""
        ...

    def close(self) -> None:
        """Release the memory. The executor cannot be used afterwards."""
        ...


def create_executor(config: EngineConfig) -> Executor:
    """Load the model where `config` says. Raises ConfigError when it cannot be set up."""
    if config.tensor_parallel_size != 1:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}; only 1 is supported yet"
        )
    # Imported late: everything above this line is of use without torch.
    from octavo.runner.model_runner import ModelRunner

    return ModelRunner(config)
