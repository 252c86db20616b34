"""The mistakes that show before a model's weights are read.

`check_options` needs no model and no torch; `check_names` knows what this build offers; `outlook`
opens the model's description: it gives the limits that the loaded engine will have or stay below,
so that requests can be admitted before the load. Whether the weights are whole, and whether the
memory is enough, only the load can say.
"""

import os
from pathlib import Path

from octavo import devices
from octavo.config import EngineConfig
from octavo.core.plan import RunnerLimits
from octavo.core.policy import Policy
from octavo.core.policy_registry import create_policy
from octavo.engine.capabilities import EngineCapabilities
from octavo.engine.ray_cluster import import_ray
from octavo.engine.trace_file import check_trace
from octavo.errors import ConfigError, nearest
from octavo.models.files import resolve
from octavo.text.chat import read_chat_template


def check_options(config: EngineConfig) -> None:
    """Check what needs neither torch nor the network: options, and a model's file. Raises
    ConfigError."""
    if config.data_parallel_size > 1 and ":" in config.device:
        raise ConfigError(
            f"device is {config.device!r}, one GPU, and data_parallel_size is "
            f"{config.data_parallel_size}: each engine has GPUs of its own; set device='cuda', and "
            "CUDA_VISIBLE_DEVICES to choose them"
        )
    _check_places(config)
    if config.scheduler != "custom":  # then the object was checked when it was given
        create_policy(config.scheduler)
    if config.chat_template is not None:
        read_chat_template(config.chat_template)
    if Path(os.path.expanduser(config.model)).is_file():
        resolve(config.model).open()  # maps it and reads its header
    if config.swap_path is not None:
        _check_folder("swap_path", config.swap_path)
    if config.trace is not None and config.distributed_executor_backend != "ray":
        # With Ray it is a file of the machine where the engine runs.
        check_trace(config.trace, config.data_parallel_size)


def _check_places(config: EngineConfig) -> None:
    """Where engines run. With Ray, it must be installed, and choose the GPUs."""
    if config.distributed_executor_backend == "ray":
        import_ray()
        if config.device != devices.kind(config.device):
            raise ConfigError(
                f"device {config.device!r} names one GPU, and with distributed_executor_backend="
                f"'ray' Ray chooses it: set device={devices.kind(config.device)!r}"
            )
        return
    for name in ("data_parallel_address", "data_parallel_rpc_port"):
        if value := getattr(config, name):
            raise ConfigError(
                f"{name} is {value!r}, and engines on this machine use no ports: leave it out, or "
                "set distributed_executor_backend='ray'"
            )


def check_in_process(config: EngineConfig) -> None:
    """Raise ConfigError for options that an engine in the caller's own process does not have."""
    if config.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size is {config.data_parallel_size}, and an LLM is one engine, in this "
            "process; use AsyncLLM or `octavo serve` for several, or threads for more cores"
        )
    if config.distributed_executor_backend == "ray":
        raise ConfigError(
            "distributed_executor_backend is 'ray', and an LLM is an engine in this process, "
            "which nobody places; use AsyncLLM or `octavo serve`"
        )


def check_names(config: EngineConfig) -> None:
    """Check names of weight formats and attention backends. Raises ConfigError."""
    # Imported late: they bring in torch, and the web process checks its options without.
    from octavo.attention import registry as attention_registry
    from octavo.quant import registry as quant_registry
    from octavo.quant.base import GGUF, METHODS, NONE, quant_config

    known = attention_registry.names()
    if config.attention_impl not in known:
        raise ConfigError(
            f"unknown attention_impl {config.attention_impl!r}; known: {', '.join(known)}"
            f"{nearest(config.attention_impl, known)}"
        )
    stored = [*quant_registry.methods(), GGUF]
    if config.quantization not in (None, NONE, *METHODS, *stored):
        raise ConfigError(
            f"quantization {config.quantization!r} is not supported"
            f"{nearest(config.quantization or '', [*METHODS, *stored])}; {', '.join(METHODS)} "
            f"quantize any model while it is loaded, {', '.join(stored)} are taken for checkpoints "
            f"that are stored so, which needs no option, and {NONE!r} dequantizes them"
        )
    own = config.quantization if config.quantization in METHODS else None
    quant_config(own, config.quantization_override)


def outlook(config: EngineConfig, policy: Policy) -> EngineCapabilities:
    """What an engine of `config` will take, from the model's description alone.

    Raises ModelNotFoundError, CheckpointError or ConfigError. The window may turn out smaller,
    where the KV cache is.
    """
    from octavo.models.loader import describe

    _, spec, window = describe(config)
    limits = RunnerLimits(
        num_blocks=2,
        block_size=config.block_size,
        block_bytes=1,
        max_model_len=window,
        vocab_size=spec.num_ids,
        eos_token_ids=spec.eos_token_ids,
        model=config.model,
        architecture=spec.architecture,
        generation_defaults=dict(spec.generation_defaults),
    )
    return EngineCapabilities(
        limits,
        str(policy.name),
        heeds_priority=bool(getattr(policy, "heeds_priority", True)),
        heeds_deadline=bool(getattr(policy, "heeds_deadline", True)),
    )


def _check_folder(name: str, given: str) -> None:
    folder = Path(os.path.expanduser(given))
    if not folder.is_dir():
        raise ConfigError(f"{name} {given!r} is not a folder; make it, or name another one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} {given!r} cannot be written to; name another folder")
