"""vLLM's `vllm.v1.engine`: other names of what is in `octavo`."""
