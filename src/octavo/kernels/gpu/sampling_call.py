"""Rows of logits on a GPU in, tokens and log-probabilities out: the callers of `sampling`.

Items go to the device in one copy, and results come back in one, which is the only wait; `submit`
and `submit_logprobs` leave results on the device, and do not wait.
"""

from collections.abc import Callable

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from octavo.kernels.gpu import sampling
from octavo.kernels.sampling import EMPTY, ITEM, NOT_FINITE, OK, Items, Logprobs, race_states

# A copy on the device of an array, under a name that stands for its buffer.
ToDevice = Callable[[str, NDArray[np.generic]], torch.Tensor]

_FLOAT32_MAX = float(np.finfo(np.float32).max)

# Pieces whose tokens one program holds in registers: 128 of them would spill.
FEW = 64
# Tokens that a program of `spread` computes; tokens that a program reads at once, and its warps.
PART = 8192
SURVEY_TILE, ROW_TILE = 4096, 4096
WARPS = 16
# Token ids that a program of `take_drawn` reads.
TAKE_TILE = 1024

_FIELDS = tuple(ITEM.names or ())
_COLUMNS = {name: _FIELDS.index(name) for name in _FIELDS}


def draw(to_device: ToDevice, logits: torch.Tensor, items: Items) -> None:
    """See `SamplingKernels.draw`; logits may also be float16."""
    if not len(items):
        return
    found = submit(to_device, logits, items).cpu().numpy()
    items["token"], items["status"] = found[:, 0], found[:, 1]


def submit(to_device: ToDevice, logits: torch.Tensor, items: Items) -> torch.Tensor:
    """The (token, status) of each item, int64 [items, 2] on the device, without waiting for it."""
    _check(logits, items)
    fields = items.view(np.int64).reshape(len(items), len(_FIELDS)).copy()
    fields[:, _COLUMNS["seed"]] = race_states(items).view(np.int64)
    sent = to_device("items", fields)
    vocab, count, device = logits.shape[1], len(items), logits.device
    shape = constants(vocab)
    pieces = shape["PIECES"]
    maxima = torch.empty((len(logits), pieces), dtype=torch.int32, device=device)
    tile = min(pieces, SURVEY_TILE // sampling.PIECE.value)
    sampling.survey[len(logits), pieces // tile](maxima, logits, vocab, PIECES=pieces, TILE=tile)
    out = torch.empty((count, 2), dtype=torch.int64, device=device)
    plans = torch.empty((count, 2), dtype=torch.int64, device=device)
    places = torch.empty((count, shape["FEW"]), dtype=torch.int32, device=device)
    parts = triton.next_power_of_2(triton.cdiv(vocab, PART))
    values = torch.empty((count, parts), dtype=torch.float64, device=device)
    winners = torch.empty((count, parts), dtype=torch.int32, device=device)
    random = bool(items["temperature"].any())
    if random:
        sampling.spread[count, parts](
            values, winners, logits, maxima, sent, vocab, PIECES=pieces, PARTS=parts,
            SIZE=PART, TILE=min(ROW_TILE, PART), num_warps=WARPS,
        )  # fmt: skip
    sampling.draw[count,](
        out, plans, places, logits, maxima, values, winners, sent, vocab, **shape, PARTS=parts,
        num_warps=WARPS,
    )  # fmt: skip
    if random:
        sampling.draw_from_row[count,](
            out, plans, logits, maxima, sent, vocab, PIECES=pieces, TILE=ROW_TILE, num_warps=WARPS
        )
    return out


def constants(vocab: int) -> dict[str, int]:
    """PIECES and FEW of the kernels for rows of `vocab` logits."""
    pieces = triton.next_power_of_2(triton.cdiv(vocab, sampling.PIECE.value))
    return {"PIECES": pieces, "FEW": min(pieces, FEW)}


def take_drawn(token_ids: torch.Tensor, drawn: torch.Tensor) -> None:
    """See `runner.device.DrawsAhead.take_drawn`."""
    count = len(token_ids)
    sampling.take_drawn[triton.cdiv(count, TAKE_TILE),](token_ids, drawn, count, TILE=TAKE_TILE)


def logprobs(to_device: ToDevice, logits: torch.Tensor, items: Items) -> Logprobs:
    """See `SamplingKernels.logprobs`."""
    assert 0 <= items["token"].min() <= items["token"].max() < logits.shape[1], "unknown token"
    return unpacked(submit_logprobs(to_device, logits, items).cpu().numpy(), items)


def submit_logprobs(
    to_device: ToDevice, logits: torch.Tensor, items: Items, drawn: torch.Tensor | None = None
) -> torch.Tensor:
    """What `unpacked` takes, int64 on the device, without waiting for it.

    drawn: what `submit` gave; an item's token is then the number of its draw there.
    """
    _check(logits, items)
    most = int(items["top_k"].max())
    asked = to_device("logprob items", np.stack((items["row"], items["token"])))
    tokens = asked[1]
    if drawn is not None:
        tokens = drawn[:, 0].index_select(0, tokens).clamp_(min=0)  # -1 where none is left
    rows = logits.index_select(0, asked[0]).float()
    status = _status(rows)
    rank = _ranks(rows)
    likeliest = rank.topk(most, 1).indices if most else rank[:, :0]
    named = torch.cat((tokens[:, None], likeliest), 1)
    place = (rank > rank.gather(1, named[:, :1])).sum(1) + 1
    wide = rows.double()
    shifted = wide.gather(1, named) - wide.logsumexp(1, keepdim=True)
    return torch.cat((status[:, None], place[:, None], named, shifted.view(torch.int64)), 1)


def unpacked(found: NDArray[np.int64], items: Items) -> Logprobs:
    """The result of `logprobs` from that of `submit_logprobs`; writes `rank` and `status`."""
    width = 1 + int(items["top_k"].max())
    items["status"] = found[:, 0]
    good = items["status"] == OK
    items["rank"][good] = found[good, 1]
    ids = found[:, 2 : 2 + width].copy()
    values = found[:, 2 + width :].copy().view(np.float64)
    absent = ~good[:, None] | (np.arange(width) > items["top_k"][:, None])
    ids[absent], values[absent] = 0, np.nan
    return ids, values


def _status(rows: torch.Tensor) -> torch.Tensor:
    """int64 [rows]"""
    largest = rows.amax(1)  # NaN if there is one
    bad = largest.isnan() | (largest == torch.inf)
    status = torch.full_like(largest, OK, dtype=torch.int64)
    return status.masked_fill(largest == -torch.inf, EMPTY).masked_fill(bad, NOT_FINITE)


def _ranks(rows: torch.Tensor) -> torch.Tensor:
    """`sampling._rank` of rows [rows, vocab]: int64, no two alike."""
    bits = rows.masked_fill(rows == 0, 0.0).view(torch.int32)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (key << 32) - torch.arange(rows.shape[1], device=rows.device)


def edited(
    to_device: ToDevice,
    logits: torch.Tensor,
    rows: NDArray[np.int64],
    closed: NDArray[np.bool_],
    edits: Items,
) -> torch.Tensor:
    """See `EditsLogits.edited`."""
    chosen = to_device("edited rows", np.stack((rows, closed.astype(np.int64))))
    copies = logits.index_select(0, chosen[0]).float()
    if len(edits):
        sent = to_device("edits", edits.view(np.int64).reshape(-1, 3))
        place, repetition = sent[:, 0], sent[:, 1].view(torch.float64)
        bias, amount = sent[:, 2:].view(torch.float32).unbind(1)
        value = copies.view(-1).index_select(0, place) + bias
        wide = value.double()
        penalized = torch.where(wide > 0, wide / repetition, wide * repetition)
        # An extreme penalty gives no infinity, as in `runner.sampler`.
        penalized = penalized.clamp(max=_FLOAT32_MAX).float()
        value = torch.where(repetition == 1, value, penalized) - amount
        value = value.masked_fill(repetition == 0, -torch.inf)
    if closed.any():
        copies.masked_fill_(chosen[1, :, None] != 0, -torch.inf)
    if len(edits):
        copies.view(-1).index_copy_(0, place, value)
    return copies


def _check(logits: torch.Tensor, items: Items) -> None:
    assert logits.dtype in (torch.float32, torch.bfloat16, torch.float16), logits.dtype
    assert logits.is_contiguous(), "rows have gaps"
    assert items.flags.c_contiguous, "items have gaps"
    assert 0 <= items["row"].min() <= items["row"].max() < len(logits), "no such row"
