"""vLLM's `vllm.engine.llm_engine`: another name of `octavo.llm_engine`."""

from octavo.llm_engine import LLMEngine as LLMEngine
