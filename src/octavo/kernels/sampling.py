"""The interface of a device's sampling kernels: one item for each token to draw.

`ReferenceSampling` is the specification: the order of tokens, the filters, the random numbers.
Penalties, bias and masks are applied to the logits before: by `runner.sampler`, or by a device that
`EditsLogits`.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

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
# A change of one token's logit: + bias, then divided by `repetition` if positive and otherwise
# multiplied by it, unless that is 1, then - amount. A repetition of 0 makes it -inf. `place`: the
# row of the copies times V, + token.
EDIT = np.dtype([("place", "i8"), ("repetition", "f8"), ("bias", "f4"), ("amount", "f4")])
# For each item None, or int32 [ceil(V / 32)] or longer: bit i of word w is 1 where token 32 w + i
# may be drawn.
Masks = Sequence[NDArray[np.int32] | None]
Floats = NDArray[np.float64]
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


@runtime_checkable
class EditsLogits(SamplingKernels, Protocol):
    """Of devices from which copies of rows to host memory would take long."""

    def edited(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        closed: NDArray[np.bool_],
        edits: Items,
    ) -> torch.Tensor:
        """float32 copies [N, V] of `rows` [N] of logits [R, V], changed by `edits` of dtype EDIT,
        no two of one place. closed [N]: where other tokens become -inf."""
        ...


@runtime_checkable
class DrawsMasked(SamplingKernels, Protocol):
    """Of devices whose draws leave out the tokens that a grammar excludes."""

    def draw_masked(self, logits: torch.Tensor, items: Items, masks: Masks) -> None:
        """`draw`, where the tokens that the mask of an item excludes count as -inf."""
        ...


@runtime_checkable
class CopiesRows(SamplingKernels, Protocol):
    """Of devices in host memory that copy rows faster than NumPy does."""

    def copies(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        masks: Masks,
        out: NDArray[np.float32],
    ) -> None:
        """`rows` [N] of logits [R, V] as float32 into `out` [N, V]; where a row has a mask, the
        tokens whose bit is 0 become -inf."""
        ...


class ReferenceSampling:
    """`SamplingKernels` in NumPy, one row at a time.

    Tokens rank by logit, the largest first, equal ones by id. Temperature, then top-k, then the
    shortest prefix whose probabilities reach top-p, then min-p. Of the kept tokens, that with the
    smallest E / weight is drawn (exponential race): E = -log1p(-v), with v the output number
    `token` of SplitMix64 in a state made of (seed, index, position). So a draw depends only
    on these and the row.
    """

    def draw(self, logits: torch.Tensor, items: Items) -> None:
        """See `SamplingKernels.draw`."""
        table = logits.float().cpu().numpy().astype(np.float64)
        for item in items:
            x = table[item["row"]]
            item["status"] = _status(x)
            item["token"] = _drawn(x, item) if item["status"] == OK else -1

    def logprobs(self, logits: torch.Tensor, items: Items) -> Logprobs:
        """See `SamplingKernels.logprobs`."""
        table = logits.float().cpu().numpy().astype(np.float64)
        ids = np.zeros((len(items), 1 + int(items["top_k"].max())), np.int64)
        values = np.full(ids.shape, np.nan)
        for item, named, value in zip(items, ids, values, strict=True):
            x = table[item["row"]]
            item["status"] = _status(x)
            if item["status"] != OK:
                continue
            order = np.argsort(-x, kind="stable")
            item["rank"] = 1 + int(np.flatnonzero(order == item["token"])[0])
            count = 1 + int(item["top_k"])
            named[:count] = [item["token"], *order[: count - 1]]
            largest = x.max()
            value[:count] = x[named[:count]] - largest - np.log(np.exp(x - largest).sum())
        return ids, values


def _status(x: Floats) -> int:
    if np.isnan(x).any() or np.isposinf(x).any():
        return NOT_FINITE
    return EMPTY if np.isneginf(x).all() else OK


def _drawn(x: Floats, item: np.void) -> int:
    if item["temperature"] == 0:
        return int(x.argmax())
    kept, weights = kept_tokens(x, item)
    return int(kept[np.argmin(_exponentials(item, kept) / weights)])


def kept_tokens(x: Floats, item: np.void) -> tuple[NDArray[np.int64], Floats]:
    """(ids, weights) of the tokens of a row that the filters of an item keep, in their order."""
    kept = np.argsort(-x, kind="stable")[: item["top_k"] or None]
    weights = np.exp((x[kept] - x[kept[0]]) / item["temperature"])
    before = np.concatenate(([0.0], np.cumsum(weights)[:-1])) / weights.sum()
    inside = (before < item["top_p"]) & (weights >= item["min_p"]) & (weights > 0)
    return kept[inside], weights[inside]


def _exponentials(item: np.void, tokens: NDArray[np.int64]) -> Floats:
    bits = split_mix(race_states(np.array([item])), tokens) >> np.uint64(11)
    found: Floats = -np.log1p(-(bits.astype(np.float64) + 0.5) * 2.0**-53)
    return found


def race_states(items: Items) -> NDArray[np.uint64]:
    """The state of the random numbers of each item."""
    state = items["seed"]
    for output in (np.zeros(len(items), np.int64), items["index"], items["position"]):
        state = split_mix(state, output)
    return state


def split_mix(state: NDArray[np.uint64], outputs: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Outputs of SplitMix64, by number, from a state."""
    z = state + (outputs.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return mixed
