"""Names of attention backends, the rule behind "auto", and the check of what a backend can do."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import torch

from octavo.attention.base import AttentionBackend, AttentionSpec, CacheLayout
from octavo.errors import ConfigError, nearest, triton_needed

# Name -> module and class, imported on demand.
_BUILT_IN = {
    "cpu": "octavo.attention.cpu:CpuAttention",
    "torch": "octavo.attention.torch_ref:TorchAttention",
    "triton": "octavo.attention.triton:TritonAttention",
}
# Where the memory of a backend is known without what computes it.
_LAYOUTS = {"triton": "octavo.attention.triton_cache:TritonCache"}
# Computes any model, on any device.
_PLAIN = "torch"
# Names of KV cache dtypes; of two names for one dtype the first is shown.
KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
LayoutT = TypeVar("LayoutT", bound=CacheLayout)
# The only table that changes at run time, through `register_attention_impl`.
_registered: dict[str, type[AttentionBackend]] = {}


def register_attention_impl(name: str, impl: type[AttentionBackend]) -> None:
    """Make `LLM(attention_impl=name)` use `impl`, a class whose instances are backends.

    Raises ConfigError for an empty name, "auto", a built-in name, or a class that lacks a
    member of the interface (`octavo.attention.AttentionBackend`). Registering a name again
    replaces the class.
    """
    if not name or name == "auto" or name in _BUILT_IN:
        raise ConfigError(
            f"attention impl name {name!r} is taken or empty; choose another than "
            f"'auto', {', '.join(map(repr, sorted(_BUILT_IN)))}"
        )
    parts = ("capabilities", "kv_layout", "write", "attend")
    if missing := [part for part in parts if not hasattr(impl, part)]:
        raise ConfigError(
            f"attention impl {name!r} lacks {', '.join(missing)}; a backend has {', '.join(parts)}"
        )
    _registered[name] = impl


def names() -> list[str]:
    """Every name that `create` takes, "auto" first."""
    return ["auto", *sorted({*_BUILT_IN, *_registered})]


def create(
    name: str,
    device: str,
    dtype: torch.dtype,
    specs: Iterable[AttentionSpec] = (),
    block_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
    order: Sequence[str] = ("cpu", "torch"),
) -> AttentionBackend:
    """The backend called `name`, checked against all requirements.

    "auto" is the first of `order`, the device's preference, that meets them. Raises ConfigError
    for an unknown name (listing the known ones) and for a request beyond the backend's
    capabilities (naming them).
    """
    return _first(name, device, dtype, specs, block_size, kv_dtype, order, _find)()


def create_layout(
    name: str,
    device: str,
    dtype: torch.dtype,
    specs: Iterable[AttentionSpec] = (),
    block_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
    order: Sequence[str] = ("cpu", "torch"),
) -> CacheLayout:
    """As `create`, but only the part that says what memory the cache takes, which is there on any
    machine."""
    return _first(name, device, dtype, specs, block_size, kv_dtype, order, _find_layout)()


def _first(
    name: str,
    device: str,
    dtype: torch.dtype,
    specs: Iterable[AttentionSpec],
    block_size: int | None,
    kv_dtype: torch.dtype | None,
    order: Sequence[str],
    find: Callable[[str], type[LayoutT]],
) -> type[LayoutT]:
    specs = list(specs)
    wanted = order if name == "auto" else [name]
    reasons: list[str] = []
    for candidate in wanted:
        impl = find(candidate)
        found = _objections(impl, device, dtype, specs, block_size, kv_dtype or dtype)
        if not found:
            return impl
        reasons.append(f"{candidate}: {'; '.join(found)}")
    message = f"attention_impl {name!r} cannot serve this model. {' | '.join(reasons)}"
    if _PLAIN not in wanted and not _objections(
        _find(_PLAIN), device, dtype, specs, block_size, kv_dtype or dtype
    ):
        message += f"; attention_impl={_PLAIN!r} can, slowly"
    raise ConfigError(message)


def _find(name: str) -> type[AttentionBackend]:
    if name in _registered:
        return _registered[name]
    if name not in _BUILT_IN:
        raise ConfigError(
            f"unknown attention_impl {name!r}; known: {', '.join(names())}{nearest(name, names())}"
        )
    with triton_needed(f"attention_impl {name!r}"):
        return cast("type[AttentionBackend]", _imported(_BUILT_IN[name]))


def _find_layout(name: str) -> type[CacheLayout]:
    if name in _LAYOUTS and name not in _registered:
        return cast("type[CacheLayout]", _imported(_LAYOUTS[name]))
    return _find(name)


def _imported(place: str) -> object:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _objections(
    impl: type[CacheLayout],
    device: str,
    dtype: torch.dtype,
    specs: list[AttentionSpec],
    block_size: int | None,
    kv_dtype: torch.dtype,
) -> list[str]:
    """A message for each requirement that `impl` does not meet."""
    can = impl.capabilities
    kind = device.partition(":")[0]
    found: list[str] = []
    if kind not in can.devices:
        found.append(f"device {kind!r} is not one of {_listed(can.devices)}")
    for field, one, known in (
        ("dtype", dtype, can.dtypes), ("kv_cache_dtype", kv_dtype, can.kv_dtypes)
    ):  # fmt: skip
        if one not in known:
            wanted = _listed(map(dtype_name, known))
            found.append(f"{field} {dtype_name(one)} is not one of {wanted}")
    if block_size and can.block_sizes and block_size not in can.block_sizes:
        found.append(f"block_size {block_size} is not one of {_listed(can.block_sizes)}")
    for head_dim in sorted({s.head_dim for s in specs}):
        if can.head_dims and head_dim not in can.head_dims:
            found.append(f"head size {head_dim} is not one of {_listed(can.head_dims)}")
    if not can.window and any(s.window is not None for s in specs):
        found.append("it has no sliding window")
    if not can.soft_cap and any(s.soft_cap is not None for s in specs):
        found.append("it has no soft cap")
    if not can.sinks and any(s.sinks for s in specs):
        found.append("it has no attention sinks")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in options and messages."""
    names = (name for name, known in KV_DTYPES.items() if known == dtype)
    return next(names, str(dtype).removeprefix("torch."))


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values)
