"""What a device's sampling kernels take and write: one item for each token to draw.

The meaning of the fields is said in `runner.sampler`, ties and random numbers in
`kernels.reference`.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

# The status of an item.
OK = 0
NOT_FINITE = 1  # a NaN or +inf among the logits
EMPTY = 2  # every logit is -inf

# One item: a row to draw from, and how. `token` and `status` are written; for log-probabilities
# `token` is given, `top_k` is how many of the likeliest, and `rank` and `status` are written.
ITEM = np.dtype(
    [("row", "i8"), ("temperature", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("top_k", "i8"),
     ("seed", "u8"), ("index", "i8"), ("position", "i8"), ("token", "i8"), ("status", "i8"),
     ("rank", "i8")]
)  # fmt: skip
Items = NDArray[np.void]
Logprobs = tuple[NDArray[np.int64], NDArray[np.float64]]


class SamplingKernels(Protocol):
    """Rows of logits [R, V] on the device, float32 or bfloat16 and contiguous, to tokens.

    Items are in host memory, contiguous.
    """

    def draw(self, logits: torch.Tensor, items: Items) -> None:
        """Draw a token for each item: writes `token` and `status`."""
        ...

    def logprobs(self, logits: torch.Tensor, items: Items) -> Logprobs:
        """(ids, log-softmax), each [N, 1 + most `top_k`]: an item's own token, then its `top_k`
        likeliest. NaN where an item has fewer, or a bad status. Writes `rank` and `status`."""
        ...
