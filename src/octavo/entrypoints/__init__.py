"""vLLM's `vllm.entrypoints`: other names of what is in `octavo`."""
