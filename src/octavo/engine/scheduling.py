"""The scheduler of a configuration, and how many requests may wait for it.

What an engine and a simulation of it share.
"""

from octavo.config import EngineConfig
from octavo.core.kv_manager import KVManager
from octavo.core.plan import RunnerLimits
from octavo.core.policy import Policy
from octavo.core.scheduler import Scheduler


def make_scheduler(
    config: EngineConfig, limits: RunnerLimits, policy: Policy, plans_ahead: bool
) -> Scheduler:
    """A scheduler over the blocks of `limits`."""
    kv = KVManager(
        limits.num_blocks,
        limits.block_size,
        config.enable_prefix_caching,
        limits.num_host_blocks,
        limits.kv_groups,
        config.max_num_batched_tokens,
    )
    return Scheduler(
        kv,
        policy,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        preemption_mode=config.preemption_mode,
        plans_ahead=plans_ahead,
    )


def queue_space(config: EngineConfig, scheduler: Scheduler) -> int:
    """How many more requests may be added now: those that may wait, or run at once."""
    may_run = config.max_num_seqs - scheduler.num_running
    return max(config.waiting_limit, may_run) - scheduler.num_waiting
