"""Which GPUs can be used, and for what: checked before Triton is needed, with the cure."""

import torch

from octavo.devices import OLDEST_GPU as OLDEST
from octavo.errors import ConfigError

# In which types, and by which methods for quantized weights (`quant.base.METHODS`), GPUs compute.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEFAULT_DTYPE = torch.bfloat16
QUANTIZATION = ("int8", "int4", "fp8")
# Plain torch is so slow that it must be asked for.
ATTENTION_ORDER = ("triton",)
# The compute capability that converts float8_e4m3fn.
OLDEST_FP8 = (8, 9)


def card(name: str) -> torch.device:
    """ "cuda" or "cuda:1" with a number, which torch wants where it sets a device."""
    return torch.device("cuda", torch.device(name).index or 0)


def check(device: torch.device) -> None:
    """Raise ConfigError, with the cure, if the GPU cannot be used."""
    if torch.version.cuda is None:
        built = "AMD GPUs" if torch.version.hip else "CPUs"
        raise ConfigError(
            f"device {device} needs a CUDA build of torch, and {torch.__version__} is built "
            f"for {built} only; install torch for CUDA, or leave device out to compute on the CPU"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {device}: torch finds no NVIDIA GPU that it can use; check that nvidia-smi "
            f"lists one and that its driver serves CUDA {torch.version.cuda}"
        )
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise ConfigError(f"device {device} does not exist; there are cuda:0 to cuda:{count - 1}")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"device {device} is a {name} of compute capability {capability[0]}.{capability[1]}; "
            f"{OLDEST[0]}.{OLDEST[1]} or newer is needed (A100, RTX 30, H100 ...)"
        )


def converts_fp8(device: torch.device) -> bool:
    """Whether the GPU converts float8_e4m3fn itself."""
    return torch.cuda.get_device_capability(device) >= OLDEST_FP8


def check_kv(device: torch.device, kv_dtype: str) -> None:
    """Raise ConfigError if the GPU cannot hold the KV cache in `kv_dtype`."""
    if kv_dtype.startswith("fp8"):
        capability = torch.cuda.get_device_capability(device)
        check_kv_of(torch.cuda.get_device_name(device), capability, kv_dtype)


def check_kv_of(name: str, capability: tuple[int, int], kv_dtype: str) -> None:
    """The same of a GPU of that name and compute capability."""
    if kv_dtype.startswith("fp8") and capability < OLDEST_FP8:
        raise ConfigError(
            f"kv_cache_dtype {kv_dtype} needs compute capability {OLDEST_FP8[0]}.{OLDEST_FP8[1]} "
            f"or newer (L4, RTX 40, H100 ...), and {name} has {capability[0]}.{capability[1]}; "
            "use kv_cache_dtype='int8', which takes the same memory"
        )
