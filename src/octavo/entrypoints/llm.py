"""vLLM's `vllm.entrypoints.llm`: another name of `octavo.llm`."""

from octavo.llm import LLM as LLM
