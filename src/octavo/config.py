"""One frozen configuration: parsed, checked, then only read.

Every field of `EngineConfig` is a keyword of `LLM(...)` and a flag of `octavo serve`
(`max_model_len` is `--max-model-len`), with vLLM's name where vLLM has one. vLLM's other options
are looked up in `vllm_names`: accepted with a neutral value, refused with a reason otherwise.
`with_` makes a changed copy; nothing is modified in place.

Not here: flags, which `utils.flags` generates from the fields, so that the two cannot diverge; what
depends on the model (its window, the KV budget), which the runner derives and reports in
`core.plan.RunnerLimits`.
"""

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal

from octavo import devices, vllm_names
from octavo.errors import ConfigError, nearest, shown
from octavo.log import get_logger
from octavo.vllm_names import Entry, Kind, Status

logger = get_logger(__name__)

# Not a package. With a `__path__`, an import of a name that is missing here asks the finders, of
# which `octavo._Refusals` knows the reason for vLLM's names.
__path__ = ()

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
PreemptionMode = Literal["auto", "swap", "recompute"]
ExecutorBackend = Literal["auto", "mp", "ray", "uni"]
KVDtype = Literal["auto", "bfloat16", "float16", "float32", "int8", "fp8", "fp8_e4m3"]

_BLOCK_SIZES = (8, 16, 32, 64, 128)
# vLLM's suffixes: small letters are powers of 1000, capitals powers of 1024. KiB and so on are
# unmistakable; MB is not, and is refused.
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])|([KMGT])(?:iB)?)?")
# The policy of `LLM`, whose callers wait for whole answers; a server's is `fifo`.
OFFLINE_SCHEDULER = "fifo,max_stretch=none"


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
                           "device has it in hardware, else float32; a CPU computes float16 in "
                           "float32")  # fmt: skip
    device: str = _option(
        "auto",
        "device to compute on; auto is a GPU where there is one; of several, cuda:1 is the second",
        names=devices.names,
        name_of=devices.kind,
        otherwise="leave it out to compute on the GPU, where there is one, or the CPU",
    )
    threads: int | None = _option(
        None,
        "compute threads, of all tensor-parallel processes together; default: OMP_NUM_THREADS, "
        "else as many as this process has processors",
        low=1,
    )
    quantization: str | None = _option(
        None,
        "quantize weights at load: int8, int4, or fp8 on a GPU; w8a8 and w4a8 on a CPU quantize "
        "activations, too; gguf computes on a file as stored, none decodes it (AWQ, GPTQ and FP8 "
        "checkpoints need no option)",
    )
    quantization_override: str | None = _option(
        None, "per-component quantization, such as lm_head=none,layers.0.*=int8"
    )
    kv_cache_dtype: KVDtype = _option("auto", "type of the KV cache; auto is dtype, int8 and fp8 "
                                      "take half the memory of bfloat16")  # fmt: skip
    attention_impl: str = _option("auto", "attention backend")
    tensor_parallel_size: int = _option(
        1, "number of processes that divide the model: a GPU each, or a share of the cores", low=1
    )
    distributed_executor_backend: ExecutorBackend = _option(
        "auto", "where engines and their processes run: mp is this machine, ray the machines of "
        "a Ray cluster, uni a single process; auto is mp"
    )  # fmt: skip
    data_parallel_size: int = _option(
        1, "number of engines behind one endpoint, each with all of the model", low=1
    )
    data_parallel_address: str | None = _option(
        None, "with ray: the address of this machine to which engines on others connect; default: "
              "the one that Ray uses"
    )  # fmt: skip
    data_parallel_rpc_port: int = _option(
        0, "with ray: the first of two ports for each engine, which connects to them; 0: any free "
           "ones", low=0
    )  # fmt: skip
    max_model_len: int | None = _option(
        None, "context window in tokens, such as 8k; default: the model's", low=1, size=True
    )
    max_num_seqs: int = _option(128, "maximum number of running requests", low=1)
    max_num_batched_tokens: int = _option(2048, "maximum number of tokens per step", low=1,
                                          size=True)  # fmt: skip
    block_size: int = _option(16, f"tokens in a KV block: one of {_BLOCK_SIZES}")
    gpu_memory_utilization: float | None = _option(
        None,
        "fraction of the device's memory (on CPU: the machine's) for weights, activations and KV; "
        "default: 0.9, and on CPU only as much of it as max_num_seqs requests can use, at most 4 "
        "GiB of KV",
    )
    kv_cache_memory_bytes: int | None = _option(
        None,
        "size of the KV cache in bytes, such as 4G; of each tensor-parallel process",
        low=1,
        size=True,
    )
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
    async_scheduling: bool | None = _option(
        None, "plan the next step while one is computed; default: on a GPU"
    )
    cuda_graph_sizes: str | None = _option(
        None, "GPU: numbers of tokens of captured steps, such as 1,2,4,8; default: up to 256"
    )
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
    tool_call_parser: str | None = _option(
        None, "format in which the model writes tool calls; default: the one that its chat "
              "template shows"
    )  # fmt: skip
    reasoning_parser: str | None = _option(
        None, "format in which the model writes reasoning; default: the one that its chat template "
              "shows"
    )  # fmt: skip
    load_progress: bool = _option(True, "show progress while loading")
    trace: str | None = _option(
        None, "file for a trace of steps and requests, which Perfetto and chrome://tracing open; "
              "each of several engines writes its own"
    )  # fmt: skip
    trace_size: int | None = _option(
        None, "most bytes of a trace, such as 64M; its last part is kept; default: 256M",
        low=1 << 16, size=True,
    )  # fmt: skip
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
        if self.distributed_executor_backend == "uni" and self.tensor_parallel_size > 1:
            raise ConfigError(
                "distributed_executor_backend='uni' is one process, and tensor_parallel_size="
                f"{self.tensor_parallel_size} takes more; set it to 'mp', or leave it out"
            )
        if self.block_size not in _BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {_BLOCK_SIZES}, not {self.block_size}")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}"
            )
        if not 0 <= self.swap_space < 2**20:
            raise ConfigError(f"swap_space must be GiB from 0, not {self.swap_space}")
        _ = self.graph_sizes  # raises
        if self.trace_size is not None and self.trace is None:
            raise ConfigError("trace_size has no effect without trace, the file to write")
        if self.generation_config not in ("auto", "octavo"):
            raise ConfigError(
                f"generation_config must be 'auto' or 'octavo', not {self.generation_config!r}"
            )

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """cuda_graph_sizes as numbers, rising; empty for the device's own choice."""
        try:
            sizes = {int(size) for size in (self.cuda_graph_sizes or "").split(",") if size}
        except ValueError:
            sizes = {0}
        if any(size < 1 for size in sizes):
            raise ConfigError(
                f"cuda_graph_sizes must be numbers of tokens from 1, such as 1,2,4,8, not "
                f"{self.cuda_graph_sizes!r}"
            )
        return tuple(sorted(sizes))

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
        """The configuration of keyword arguments, ours or vLLM's; ConfigError for any other."""
        return cls(**in_our_names(cls, options))


def check_names(cls: type, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that is no field of the dataclass `cls`."""
    known = [f.name for f in fields(cls)]
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}{nearest(name, known)}")


def check_type(item: "Field[Any]", value: object) -> None:
    """Raise ConfigError unless `value` is of the field's annotation, and within its bounds."""
    allowed, choices, optional = kinds_of(item)
    if value is None and optional:
        return
    wanted = f"one of {choices}" if choices else " or ".join(t.__name__ for t in allowed)
    good = _name_of(item, value) in choices if choices else _is(value, allowed)
    if not good:
        advice = f": {item.metadata['otherwise']}" if "otherwise" in item.metadata else ""
        raise ConfigError(f"{item.name} must be {wanted}, not {value!r}{advice}")
    low = item.metadata.get("low")
    if low is not None and value < low:
        raise ConfigError(f"{item.name} must be at least {low}, not {value}")


def _name_of(item: "Field[Any]", value: object) -> object:
    """What of a value must be one of the field's choices."""
    name_of = item.metadata.get("name_of")
    return name_of(value) if name_of and isinstance(value, str) else value


def _is(value: object, allowed: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in allowed
    if float in allowed and isinstance(value, int):
        return True
    return isinstance(value, allowed)


def kinds_of(item: "Field[Any]") -> tuple[tuple[type, ...], tuple[str, ...], bool]:
    """(types, choices, may be None) of a field's annotation."""
    hint = item.type
    if "names" in item.metadata:  # choices that may grow at run time
        return (str,), item.metadata["names"](), False
    if typing.get_origin(hint) is Literal:
        return (str,), typing.get_args(hint), False
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = tuple(p for p in parts if isinstance(p, type) and p is not type(None))
    return kinds, (), type(None) in parts


def in_our_names(
    cls: type, options: Mapping[str, Any], kinds: tuple[Kind, ...] = (Kind.ENGINE,)
) -> dict[str, Any]:
    """`options` as fields of `cls`: vLLM's names are replaced, and neutral values left out.

    kinds: of which of vLLM's names they may be. Raises ConfigError for any other name, and for
    what is asked for and not supported, saying why.
    """
    known = {item.name: item for item in fields(cls)}
    ours: dict[str, Any] = {}
    for name, value in options.items():
        entry = next(filter(None, (vllm_names.find(kind, name) for kind in kinds)), None)
        if entry is None and name not in known:
            raise ConfigError(f"unknown option {name!r}{nearest(name, known)}")
        if type(value).__module__ == "torch":
            value = str(value).removeprefix("torch.")  # a dtype
        if entry is not None:
            _note(entry, value)
            if name not in known and entry.status in (Status.NO_EFFECT, Status.REFUSED):
                if not entry.is_neutral(value):
                    raise ConfigError(f"{name}={shown(value)}: {entry.refusal()}")
                continue
            if entry.is_neutral(value):
                continue
            value = _meant(entry, value)
        field_name = entry.ours if entry is not None and entry.ours else name
        if field_name in ours and ours[field_name] != value:
            raise ConfigError(f"{name} is vLLM's name of {field_name}; give one of them")
        if isinstance(value, str) and known[field_name].metadata.get("size"):
            value = parse_size(field_name, value)
        ours[field_name] = value
    return ours


def _meant(entry: Entry, value: object) -> object:
    return next((ours for theirs, ours in entry.meaning if vllm_names.same(theirs, value)), value)


def _note(entry: Entry, value: object) -> None:
    """Log what a value that vLLM's users give means here, where they may not expect it."""
    if entry.name == "trust_remote_code" and value is True:
        logger.info("%s=%r: %s", entry.name, value, entry.note)


def parse_size(name: str, text: str) -> int:
    """A count of tokens or bytes: 4096, 4k (1000), 4K or 4KiB (1024); ConfigError for others."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ConfigError(
            f"{name} must be a number such as 4096, 4k (x 1000), 4K or 4KiB (x 1024), "
            f"not {shown(text)}"
        )
    number, small, capital = found.groups()
    base, letter = (1000, small) if small else (1024, capital)
    factor = base ** (" kmgt".index(letter.lower()) if letter else 0)
    value = float(number) * factor if "." in number else int(number) * factor
    if value != int(value):
        raise ConfigError(f"{name} must be a whole number, not {shown(text)}")
    return int(value)
