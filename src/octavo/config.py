"""One frozen configuration: parsed, checked, then only read.

Every field of `EngineConfig` is a keyword of `LLM(...)` and a flag of `octavo serve`
(`max_model_len` is `--max-model-len`), with vLLM's name where vLLM has one. Flags are
generated from the fields, so the two cannot diverge. `with_` makes a changed copy; nothing is
modified in place. What depends on the model (its window, the KV budget) is derived by the
runner, which reports it in `core.plan.RunnerLimits`.
"""

import argparse
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal

from octavo import devices
from octavo.errors import ConfigError, nearest

Dtype = Literal["auto", "bfloat16", "float32"]
PreemptionMode = Literal["auto", "swap", "recompute"]
KVDtype = Literal["auto", "bfloat16", "float32", "int8", "fp8", "fp8_e4m3"]

_BLOCK_SIZES = (8, 16, 32, 64, 128)


def _option(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True)
class EngineConfig:
    """The configuration of an engine. Raises ConfigError, naming field, value and remedy."""

    model: str = _option("smollm2", "Hugging Face id, folder, .gguf file, or embedded name")
    tokenizer: str | None = _option(
        None, "folder, file or hub id of the tokenizer, if not the model's"
    )
    revision: str | None = _option(None, "branch, tag or commit of a Hugging Face id")
    dtype: Dtype = _option("auto", "type of weights and activations; auto is bfloat16 where the "
                           "processor has it in hardware, else float32")  # fmt: skip
    device: str = _option("auto", "device to compute on", names=devices.names)
    quantization: str | None = _option(None, "weight quantization: int8 or int4")
    quantization_override: str | None = _option(
        None, "per-component quantization, such as lm_head=none,layers.0.*=int8"
    )
    kv_cache_dtype: KVDtype = _option("auto", "type of the KV cache; auto is dtype, int8 and fp8 "
                                      "take half the memory of bfloat16")  # fmt: skip
    attention_impl: str = _option("auto", "attention backend")
    tensor_parallel_size: int = _option(1, "number of tensor-parallel processes", low=1)
    max_model_len: int | None = _option(
        None, "context window in tokens; default: the model's", low=1
    )
    max_num_seqs: int = _option(128, "maximum number of running requests", low=1)
    max_num_batched_tokens: int = _option(2048, "maximum number of tokens per step", low=1)
    block_size: int = _option(16, f"tokens in a KV block: one of {_BLOCK_SIZES}")
    gpu_memory_utilization: float = _option(
        0.9,
        "fraction of the device's memory (on CPU: the machine's) for weights, activations and KV",
    )
    kv_cache_memory_bytes: int | None = _option(None, "size of the KV cache in bytes", low=1)
    num_gpu_blocks_override: int | None = _option(None, "number of KV blocks", low=1)
    swap_space: float = _option(4, "GiB of host memory for the KV of preempted requests")
    swap_path: str | None = _option(
        None, "folder on a disk for swapped KV, where host memory is scarce (CPU: default memory)"
    )
    preemption_mode: PreemptionMode = _option(
        "auto", "on preemption: swap the KV, recompute it, or whichever is estimated cheaper"
    )
    enable_prefix_caching: bool = _option(True, "reuse the KV of equal prompt prefixes")
    enforce_eager: bool = _option(False, "disable graph capture")
    deterministic: bool = _option(
        False,
        "batch-invariant: bitwise equal results whatever else is in the batch, even where a "
        "faster GEMM is not",
    )
    scheduler: str = _option("fifo", "scheduling policy: a name, or module:Class, with options")
    max_waiting: int | None = _option(
        None, "maximum number of waiting requests; default: 4 x max_num_seqs + 1024", low=0
    )
    seed: int | None = _option(
        None, "makes requests without a seed reproducible, in their order; default: random"
    )
    generation_config: str = _option(
        "auto", "auto: the model's own sampling defaults; octavo: only the built-in ones"
    )
    chat_template: str | None = _option(None, "file with a chat template, if not the model's")
    load_progress: bool = _option(True, "show progress while loading")
    huge_pages: bool = _option(
        True, "CPU: weights and KV in memory pages of 2 MiB; changes the allocator of this process"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            check_type(item, getattr(self, item.name))
        self._check_values()

    def _check_values(self) -> None:
        if not self.model.strip():
            raise ConfigError("model must not be empty")
        if self.block_size not in _BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {_BLOCK_SIZES}, not {self.block_size}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}"
            )
        if not 0 <= self.swap_space < 2**20:
            raise ConfigError(f"swap_space must be GiB from 0, not {self.swap_space}")
        if self.generation_config not in ("auto", "octavo"):
            raise ConfigError(
                f"generation_config must be 'auto' or 'octavo', not {self.generation_config!r}"
            )

    @property
    def waiting_limit(self) -> int:
        if self.max_waiting is not None:
            return self.max_waiting
        return 4 * self.max_num_seqs + 1024

    def with_(self, **changes: Any) -> "EngineConfig":
        """A new configuration with some fields changed."""
        check_names(type(self), changes)
        return replace(self, **changes)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> "EngineConfig":
        """The configuration of keyword arguments; an unknown name raises ConfigError."""
        check_names(cls, options)
        return cls(**options)


def check_names(cls: type, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that is no field of the dataclass `cls`."""
    known = [f.name for f in fields(cls)]
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}{nearest(name, known)}")


def check_type(item: "Field[Any]", value: object) -> None:
    """Raise ConfigError unless `value` is of the field's annotation, and within its bounds."""
    allowed, choices, optional = _kinds(item)
    if value is None and optional:
        return
    wanted = f"one of {choices}" if choices else " or ".join(t.__name__ for t in allowed)
    good = value in choices if choices else _is(value, allowed)
    if not good:
        raise ConfigError(f"{item.name} must be {wanted}, not {value!r}")
    low = item.metadata.get("low")
    if low is not None and value < low:
        raise ConfigError(f"{item.name} must be at least {low}, not {value}")


def _is(value: object, allowed: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in allowed
    if float in allowed and isinstance(value, int):
        return True
    return isinstance(value, allowed)


def _kinds(item: "Field[Any]") -> tuple[tuple[type, ...], tuple[str, ...], bool]:
    """(types, choices, may be None) of a field's annotation."""
    hint = item.type
    if "names" in item.metadata:  # choices that may grow at run time
        return (str,), item.metadata["names"](), False
    if typing.get_origin(hint) is Literal:
        return (str,), typing.get_args(hint), False
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(p for p in parts if isinstance(p, type) and p is not type(None))
    return kinds, (), type(None) in parts


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def add_flags(parser: argparse._ActionsContainer, cls: type, skip: tuple[str, ...] = ()) -> None:
    """Give `parser` one flag for each field of `cls`. Flags left out leave no attribute."""
    for item in fields(cls):
        if item.name in skip:
            continue
        kinds, choices, _ = _kinds(item)
        common: dict[str, Any] = {
            "dest": item.name,
            "default": argparse.SUPPRESS,
            "help": f"{item.metadata['help']} (default: {item.default})",
        }
        if kinds == (bool,):
            common["action"] = argparse.BooleanOptionalAction
        elif choices:
            common["choices"] = choices
        else:
            common["type"] = kinds[0]
            common["metavar"] = kinds[0].__name__.upper()
        parser.add_argument(flag_name(item.name), **common)
