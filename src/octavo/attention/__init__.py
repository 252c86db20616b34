"""Attention backends: the contract, the registry, and one file per backend."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.attention.base import (
        AttentionBackend,
        AttentionMetadata,
        AttentionSpec,
        Capabilities,
    )
    from octavo.attention.registry import create, names, register_attention_impl

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "Capabilities",
    "create",
    "names",
    "register_attention_impl",
]


def __getattr__(name: str) -> Any:
    # Late, so that `import octavo` stays free of torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from octavo.attention import base, registry

    return getattr(registry if hasattr(registry, name) else base, name)
