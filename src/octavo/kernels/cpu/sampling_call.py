"""Rows of logits in, tokens and log-probabilities out: the callers of `sampling`.

Free of Numba. How tokens are drawn and ties are broken is described in `sampling`.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.cpu import abi, openmp
from octavo.kernels.cpu.abi import PIECE
from octavo.kernels.cpu.kernel import Kernel, address, kernel
from octavo.kernels.sampling import EMPTY, ITEM, NOT_FINITE, OK, Items, Masks

__all__ = ["EMPTY", "ITEM", "NOT_FINITE", "OK", "Items", "draw", "kernels", "logprobs"]

# Work of fewer logits is done by the calling thread: a greedy row of 49,152 takes 7 us, and to
# wake others a few us; on a busy machine they may come milliseconds late.
_SHARED_FROM = 2**17

_KERNELS = {"draw": abi.DRAW, "logprobs": abi.LOGPROBS, "copies": abi.COPIES}
_PACKERS = {name: declared.packer() for name, declared in _KERNELS.items()}


def draw(logits: torch.Tensor, items: Items, masks: Masks | None = None) -> None:
    """Draw a token for each item. logits: float32 or bfloat16 [R, V] without gaps. masks: see
    `kernels.sampling.DrawsMasked`."""
    if masks is None:
        _run("draw", logits, items, masks=0)
        return
    at = _addresses(masks, items.size, logits.shape[1])
    _run("draw", logits, items, masks=at.ctypes.data)


def logprobs(logits: torch.Tensor, items: Items) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(ids, log-softmax), each [N, 1 + most]: the item's own token, then its `top_k` likeliest.

    logits: float32 or bfloat16 [R, V] without gaps. NaN where an item has fewer, or a bad status.
    """
    vocab = logits.shape[1]
    assert items["token"].min() >= 0, "an item has no token"
    assert items["token"].max() < vocab, "an item's token is not in the vocabulary"
    assert items["top_k"].max() <= vocab, "an item wants more tokens than there are"
    most = 1 + int(items["top_k"].max())
    ids = np.zeros((items.size, most), np.int64)
    values = np.full(ids.shape, np.nan)
    _run(
        "logprobs", logits, items,
        out_ids=ids.ctypes.data, out_values=values.ctypes.data, out_size=most,
    )  # fmt: skip
    return ids, values


def copies(
    logits: torch.Tensor,
    rows: NDArray[np.int64],
    masks: Masks,
    out: NDArray[np.float32],
) -> None:
    """See `kernels.sampling.CopiesRows`."""
    count, vocab = out.shape
    assert logits.dtype in (torch.float32, torch.bfloat16), logits.dtype
    assert logits.is_contiguous(), "rows have gaps"
    assert len(rows) == count, "a copy has no row"
    assert 0 <= rows.min() <= rows.max() < logits.shape[0], "no such row"
    at = _addresses(masks, count, vocab)
    threads = min(openmp.threads(), count) if count * vocab >= _SHARED_FROM else 1
    arguments = _PACKERS["copies"](
        count=count, rows=rows.ctypes.data, masks=at.ctypes.data, logits=address(logits),
        vocab=vocab, logit_bytes=logits.itemsize, out=out.ctypes.data,
    )  # fmt: skip
    kernel(abi.COPIES).run(arguments, threads)


def kernels() -> list[Kernel]:
    """All there are here; to load one takes seconds the first time on a machine."""
    return [kernel(declared) for declared in _KERNELS.values()]


def _addresses(masks: Masks, count: int, vocab: int) -> NDArray[np.int64]:
    assert len(masks) == count, "an item has no mask"
    assert all(m is None or 32 * m.size >= vocab for m in masks), "a mask is too short"
    return np.array([0 if mask is None else mask.ctypes.data for mask in masks], np.int64)


def _run(name: str, logits: torch.Tensor, items: Items, **more: int) -> None:
    """more: arguments that not both kernels have, or not always."""
    vocab, count = logits.shape[1], items.size
    assert logits.dtype in (torch.float32, torch.bfloat16), logits.dtype
    assert logits.is_contiguous(), "rows have gaps"
    assert items.flags.c_contiguous, "items have gaps"
    assert 0 <= items["row"].min() <= items["row"].max() < logits.shape[0], "no such row"
    threads = min(openmp.threads(), count) if count * vocab >= _SHARED_FROM else 1
    # tops [pieces], keys, ids, weights, a row [V + 1 each], 4 bytes all: touched as far as needed.
    size = (4 * (vocab // PIECE + 1 + 4 * (vocab + 1)) + 63) // 64 * 64
    scratch = torch.empty(size * threads, dtype=torch.uint8)
    given = {"out_ids": 0, "out_values": 0, "out_size": 0, **more}
    arguments = _PACKERS[name](
        count=count, items=items.ctypes.data, logits=address(logits), vocab=vocab,
        scratch=address(scratch), scratch_size=size, logit_bytes=logits.itemsize, **given,
    )  # fmt: skip
    kernel(_KERNELS[name]).run(arguments, threads)
