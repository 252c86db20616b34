"""vLLM's `vllm.v1`: other names of what is in `octavo`."""
