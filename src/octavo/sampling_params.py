"""vLLM's `vllm.sampling_params`: another name of `octavo.params`."""

from octavo.params import RequestOutputKind as RequestOutputKind
from octavo.params import SamplingParams as SamplingParams

# Not a package: so that a name of vLLM's that is missing here is asked for by `octavo._Refusals`.
__path__ = ()
