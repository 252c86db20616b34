"""Octavo: a small, fast engine that serves large language models.

Public names are imported when first used, so that `import octavo` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.version import __version__

if TYPE_CHECKING:
    from octavo import attention as attention
    from octavo import devices as devices
    from octavo import schedulers as schedulers
    from octavo.async_llm import AsyncLLM as AsyncLLM
    from octavo.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from octavo.llm import LLM as LLM
    from octavo.outputs import CompletionOutput as CompletionOutput
    from octavo.outputs import Logprob as Logprob
    from octavo.outputs import RequestOutput as RequestOutput
    from octavo.params import RequestOutputKind as RequestOutputKind
    from octavo.params import SamplingParams as SamplingParams

_WHERE = {
    "AsyncLLM": "octavo.async_llm",
    "AsyncLLMEngine": "octavo.async_llm",
    "CompletionOutput": "octavo.outputs",
    "LLM": "octavo.llm",
    "Logprob": "octavo.outputs",
    "RequestOutput": "octavo.outputs",
    "RequestOutputKind": "octavo.params",
    "SamplingParams": "octavo.params",
    "attention": "octavo.attention",
    "devices": "octavo.devices",
    "schedulers": "octavo.schedulers",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
    "attention",
    "devices",
    "schedulers",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    module = import_module(_WHERE[name])
    value = module if _WHERE[name] == f"octavo.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
