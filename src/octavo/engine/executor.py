"""Runs plans: in this process; later, on tensor-parallel ranks or on Ray.

An executor owns the runner. The engine depends only on this interface, so that engine, scheduler
and server can be tested without weights (`engine.fake`).
"""

from typing import Protocol

from octavo import progress
from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits, StepPlan, StepResult
from octavo.engine.preflight import check_names, check_options


class Executor(Protocol):
    """Runs plans. Created with the model loaded, so `limits` are known."""

    limits: RunnerLimits

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step. An exception ends the engine; an error of one row is in its result."""
        ...

    def explain(self) -> dict[str, str]:
        """What implements each operation, and why: for the log and for diagnosis."""
        ...

    def close(self) -> None:
        """Release the memory. The executor cannot be used afterwards."""
        ...


def create_executor(config: EngineConfig) -> Executor:
    """Load the model where `config` says. Raises ConfigError when it cannot be set up."""
    check_options(config)
    with progress.phase(f"opening {config.model}"):
        check_names(config)
        # Imported late: the rest of this module works without torch.
        from octavo.runner.model_runner import ModelRunner

    return ModelRunner(config)
