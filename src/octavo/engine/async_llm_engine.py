"""vLLM's `vllm.engine.async_llm_engine`: another name of `octavo.async_llm`."""

from octavo.async_llm import AsyncLLMEngine as AsyncLLMEngine
