"""vLLM's `vllm.sampling_params`: another name of `octavo.params`."""

from octavo.params import RequestOutputKind as RequestOutputKind
from octavo.params import SamplingParams as SamplingParams
from octavo.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

# Not a package. With a `__path__`, an import of a name that is missing here asks the finders, of
# which `octavo._Refusals` knows the reason for vLLM's names.
__path__ = ()
