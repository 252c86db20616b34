"""What /metrics says of the configuration, in the labels of `octavo:config_info`.

For whoever judges the other metrics, such as `octavo doctor`. Only settings that bear on load and
memory; no paths, keys or names of files.
"""

import os

from octavo import cgroup, log
from octavo.config import EngineConfig

_SETTINGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "data_parallel_size",
    "tensor_parallel_size",
    "device",
    "quantization",
    "kv_cache_dtype",
    "swap_space",
    "preemption_mode",
    "enable_prefix_caching",
)


def config_labels(config: EngineConfig) -> dict[str, str]:
    """Setting -> its value as text, "" for one that is not set.

    threads: what was asked for by flag or OMP_NUM_THREADS. processors, cpu_quota: what this
    process, and engines on its machine, may use.
    """
    values = {name: getattr(config, name) for name in _SETTINGS}
    values["max_waiting"] = config.waiting_limit
    # Of a policy's own only the name: its module and options are the user's.
    values["scheduler"] = config.scheduler if ":" not in config.scheduler else "custom"
    values["threads"] = config.threads or log.threads_from_environment()
    values["processors"] = _processors()
    values["cpu_quota"] = cgroup.processor_quota()
    return {name: "" if value is None else str(value) for name, value in values.items()}


def _processors() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
