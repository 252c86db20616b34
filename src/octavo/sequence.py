"""vLLM's `vllm.sequence`, where `Logprob` was: another name of `octavo.outputs`."""

from octavo.outputs import Logprob as Logprob
