"""Octavo: a small, fast engine that serves large language models.

Public names are imported when first used, so that `import octavo` costs nothing. An import that
vLLM has and Octavo has not fails with the reason (`vllm_names`).
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from octavo.version import __version__

if TYPE_CHECKING:
    from octavo import attention as attention
    from octavo import devices as devices
    from octavo import schedulers as schedulers
    from octavo.async_llm import AsyncLLM as AsyncLLM
    from octavo.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from octavo.engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs
    from octavo.engine.arg_utils import EngineArgs as EngineArgs
    from octavo.inputs import PromptType as PromptType
    from octavo.inputs import TextPrompt as TextPrompt
    from octavo.inputs import TokensPrompt as TokensPrompt
    from octavo.llm import LLM as LLM
    from octavo.llm_engine import LLMEngine as LLMEngine
    from octavo.outputs import CompletionOutput as CompletionOutput
    from octavo.outputs import Logprob as Logprob
    from octavo.outputs import RequestOutput as RequestOutput
    from octavo.params import RequestOutputKind as RequestOutputKind
    from octavo.params import SamplingParams as SamplingParams
    from octavo.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

_WHERE = {
    "AsyncEngineArgs": "octavo.engine.arg_utils",
    "AsyncLLM": "octavo.async_llm",
    "AsyncLLMEngine": "octavo.async_llm",
    "CompletionOutput": "octavo.outputs",
    "EngineArgs": "octavo.engine.arg_utils",
    "LLM": "octavo.llm",
    "LLMEngine": "octavo.llm_engine",
    "Logprob": "octavo.outputs",
    "PromptType": "octavo.inputs",
    "RequestOutput": "octavo.outputs",
    "RequestOutputKind": "octavo.params",
    "SamplingParams": "octavo.params",
    "StructuredOutputsParams": "octavo.structured_outputs",
    "TextPrompt": "octavo.inputs",
    "TokensPrompt": "octavo.inputs",
    "attention": "octavo.attention",
    "devices": "octavo.devices",
    "schedulers": "octavo.schedulers",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "attention",
    "devices",
    "schedulers",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(
            _reason(name) or f"module 'octavo' has no attribute {name!r}", name=name
        )
    module = import_module(_WHERE[name])
    value = module if _WHERE[name] == f"octavo.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def _reason(path: str) -> str | None:
    from octavo.vllm_names import refused_import

    return refused_import(path)


class _Refusals:
    """Asked last for a module below `octavo`, and for a name that `from octavo import` misses."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        package, _, name = fullname.partition(".")
        if package == "octavo" and (reason := _reason(name)):
            raise ImportError(reason, name=fullname)


sys.meta_path.append(_Refusals)


def __dir__() -> list[str]:
    return __all__
