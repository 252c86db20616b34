"""vLLM's `vllm.logprobs`: another name of `octavo.outputs`."""

from octavo.outputs import Logprob as Logprob
