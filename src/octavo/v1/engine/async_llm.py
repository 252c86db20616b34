"""vLLM's `vllm.v1.engine.async_llm`: another name of `octavo.async_llm`."""

from octavo.async_llm import AsyncLLM as AsyncLLM
