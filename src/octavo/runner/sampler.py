"""Logits to tokens: a pure function of the logits and of each row's `SampleSpec`.

The order of processors: the mask of a grammar, allowed ids and bad words, logit bias, repetition
penalty, frequency and presence penalties, the min-tokens mask; then temperature, top-k, top-p,
min-p, and the draw. Log-probabilities are those of the raw logits, before all of that but the
grammar's mask. Tie-breaking and random numbers are specified in `kernels.sampling`; the device's
kernels draw. Penalties, bias and masks are applied here, to copies of rows in host memory, or by
the device (`EditsLogits`; of masks alone, `DrawsMasked`).

A row whose logits contain a NaN or +inf, or where no token is left to draw, gets an error; other
rows are unaffected. A logit of -inf is a token that cannot be drawn.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import SampleSpec, TokenLogprobs, TokenMask
from octavo.errors import EngineError
from octavo.kernels import sampling as ops
from octavo.kernels.sampling import CopiesRows, DrawsMasked, EditsLogits, SamplingKernels
from octavo.params import SamplingParams
from octavo.runner.edits import edits
from octavo.structured_outputs import FIELD

_Floats = NDArray[np.float32]
# A copy on the device of an array, under a name that stands for its buffer.
Send = Callable[[str, NDArray[np.generic]], torch.Tensor]

_MASK_64 = 2**64 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)

# Rows with penalties, bias or masks are copied this many at a time: 3 MB at a vocabulary of 49,152
# stay in the CPU caches, and 64 such rows took 3 ms less than with one copy of all.
_GROUP = 16

NOT_NUMBERS = "the model gave logits that are not numbers (NaN or infinity)"
_MESSAGES = {
    ops.NOT_FINITE: NOT_NUMBERS,
    ops.EMPTY: "no token is left to draw: allowed_token_ids, bad_words, min_tokens and the "
    "model's own masks, or structured_outputs, exclude all of them",
}


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One drawn token; `token_id` is -1 when `error` says why there is none. error_param: the
    request's field that causes it; None for a fault of the engine."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    error_param: str | None = None


def sample(
    kernels: SamplingKernels,
    logits: torch.Tensor,
    specs: Sequence[SampleSpec],
    rows: Sequence[int] | None = None,
) -> list[Sampled]:
    """Draw one token for each spec.

    logits: [R, V], float32 or bfloat16; not changed. rows: the row of `logits` for each spec
    (choices of one prompt share a row); by default spec i draws from row i. kernels: of the
    device that holds `logits`.
    """
    if not specs:
        return []
    table = for_kernels(logits)
    items, plain = items_of(specs, rows)
    if plain:
        kernels.draw(table, items)
        return sampled(specs, items, {}, {})
    errors = _draw(kernels, table, specs, items)
    return sampled(specs, items, errors, _requested_logprobs(kernels, table, specs, items))


def items_of(specs: Sequence[SampleSpec], rows: Sequence[int] | None) -> tuple[ops.Items, bool]:
    """The items of `sample`, and whether each draws its row's largest logit, and that is all."""
    at = range(len(specs)) if rows is None else rows
    items = np.zeros(len(specs), ops.ITEM)
    plain = all(_is_argmax(spec) for spec in specs)
    if plain:
        items["row"] = at
    else:
        items[:] = [_item(spec, row) for spec, row in zip(specs, at, strict=True)]
    return items, plain


def prompt_logprobs(
    kernels: SamplingKernels, logits: torch.Tensor, targets: Sequence[int], k: int
) -> tuple[TokenLogprobs, ...]:
    """The log-probability of `targets[t]` under row t of `logits` [T, V], and the k likeliest.

    A row with a NaN or +inf gives only its target, with logprob NaN and rank 0.
    """
    if not targets:
        return ()
    table = for_kernels(logits)
    items = target_items(targets, k, table.shape[1])
    return tuple(token_logprobs(items, kernels.logprobs(table, items)))


def target_items(targets: Sequence[int], k: int, vocab: int) -> ops.Items:
    """The items of `prompt_logprobs`."""
    items = np.zeros(len(targets), ops.ITEM)
    items["row"] = range(len(targets))
    items["token"] = targets
    items["top_k"] = min(k, vocab)
    return items


def for_kernels(logits: torch.Tensor) -> torch.Tensor:
    """float32 or bfloat16, contiguous."""
    table = logits.detach().contiguous()
    return table if table.dtype in (torch.float32, torch.bfloat16) else table.float()


def _is_argmax(spec: SampleSpec) -> bool:
    params = spec.params
    return params.greedy and params.logprobs is None and not adjusts(spec)


def adjusts(spec: SampleSpec) -> bool:
    """Whether anything changes this row's logits before temperature and filters."""
    return spec.mask is not None or _edits(spec)


def _edits(spec: SampleSpec) -> bool:
    """Whether anything but a grammar's mask does."""
    params = spec.params
    return bool(
        params.needs_history
        or spec.bad_words
        or params.logit_bias
        or params.allowed_token_ids is not None
        or (spec.min_tokens_left > 0 and spec.stop_ids)
    )


def _item(spec: SampleSpec, row: int) -> tuple[float, ...]:
    """The fields of `ops.ITEM`."""
    p = spec.params
    seed = spec.seed & _MASK_64
    place = (spec.index, spec.position)
    return (row, p.temperature, p.top_p, p.min_p, p.top_k, seed, *place, -1, ops.OK, 0)


def _draw(
    kernels: SamplingKernels,
    table: torch.Tensor,
    specs: Sequence[SampleSpec],
    items: ops.Items,
) -> dict[int, EngineError]:
    """Fill in tokens and status; returns {spec: error} for specs with unknown ids."""
    adjusted = [i for i, spec in enumerate(specs) if adjusts(spec)]
    if not adjusted:
        kernels.draw(table, items)
        return {}
    if isinstance(kernels, EditsLogits):
        return _draw_edited(kernels, table, specs, items)
    errors: dict[int, EngineError] = {}
    if isinstance(kernels, DrawsMasked):
        adjusted = [i for i in adjusted if _edits(specs[i])]
    if len(adjusted) < len(specs):
        _draw_unedited(kernels, table, specs, items, adjusted, errors)
    if not adjusted:
        return errors
    copies = np.empty((min(_GROUP, len(adjusted)), table.shape[1]), np.float32)
    for begin in range(0, len(adjusted), _GROUP):
        group = adjusted[begin : begin + _GROUP]
        drawn = items[group]
        masks = [_words(i, specs[i], errors) for i in group]
        _copy_rows(kernels, table, drawn["row"].copy(), masks, copies[: len(group)])
        for n, i in enumerate(group):
            if (error := _adjust(copies[n], specs[i])) is not None:
                errors[i] = error
        drawn["row"] = range(len(group))
        kernels.draw(torch.from_numpy(copies).to(table.device), drawn)
        items["token"][group], items["status"][group] = drawn["token"], drawn["status"]
    return errors


def _draw_unedited(
    kernels: SamplingKernels,
    table: torch.Tensor,
    specs: Sequence[SampleSpec],
    items: ops.Items,
    edited: Sequence[int],
    errors: dict[int, EngineError],
) -> None:
    """`_draw` for all specs but those of `edited`: with nothing but masks, if with that."""
    at = sorted(set(range(len(specs))) - set(edited)) if edited else list(range(len(specs)))
    drawn = items[at] if edited else items
    if isinstance(kernels, DrawsMasked):
        kernels.draw_masked(table, drawn, [_words(i, specs[i], errors) for i in at])
    else:
        kernels.draw(table, drawn)
    if edited:
        items[at] = drawn


def _draw_edited(
    kernels: EditsLogits, table: torch.Tensor, specs: Sequence[SampleSpec], items: ops.Items
) -> dict[int, EngineError]:
    """`_draw` from copies of rows on the device."""
    errors: dict[int, EngineError] = {}
    for begin, copies, drawn in edited_rows(kernels, table, specs, items, errors):
        kernels.draw(copies, drawn)
        items["token"][begin : begin + len(drawn)] = drawn["token"]
        items["status"][begin : begin + len(drawn)] = drawn["status"]
    return errors


def edited_rows(
    kernels: EditsLogits,
    table: torch.Tensor,
    specs: Sequence[SampleSpec],
    items: ops.Items,
    errors: dict[int, EngineError],
    send: Send | None = None,
) -> Iterator[tuple[int, torch.Tensor, ops.Items]]:
    """(first spec, copies of rows as the specs change them, items of these), as many at a time as
    there are rows. Adds {spec: error} of specs with unknown ids. send: see `_close`."""
    vocab = table.shape[1]
    for begin in range(0, len(specs), len(table)):
        drawn = items[begin : begin + len(table)].copy()
        closed = np.zeros(len(drawn), np.bool_)
        changes = [np.zeros(0, ops.EDIT)]
        masks: dict[int, NDArray[np.bool_]] = {}
        for n, spec in enumerate(specs[begin : begin + len(table)]):
            if not adjusts(spec):
                continue
            try:
                if spec.mask is not None:
                    masks[n] = _closed(spec.mask, vocab)
                changes.append(edits(spec, vocab))
            except (IndexError, EngineError) as error:
                known = error if isinstance(error, EngineError) else None
                errors[begin + n] = known or _unknown_id(spec, vocab)
                continue
            changes[-1]["place"] += n * vocab
            closed[n] = spec.params.allowed_token_ids is not None
        copies = kernels.edited(table, drawn["row"].copy(), closed, np.concatenate(changes))
        _close(copies, masks, send)
        drawn["row"] = range(len(drawn))
        yield begin, copies, drawn


def _close(
    rows: torch.Tensor, masks: Mapping[int, NDArray[np.bool_]], send: Send | None = None
) -> None:
    """Let no token be drawn from `rows` [N, V] where the mask [V] of a row, by its number, is
    true; in place. send: `Device.tensor`, where the host must not wait for the device."""
    if masks:
        send = send or (lambda _, array: torch.from_numpy(array).to(rows.device))
        closed = send("masks", np.stack(list(masks.values())))
        at = send("masked rows", np.array(list(masks), np.int64))
        rows[at] = rows[at].masked_fill_(closed, -torch.inf)


def _words(
    number: int, spec: SampleSpec, errors: dict[int, EngineError]
) -> NDArray[np.int32] | None:
    """Of the mask of a spec, if it has one; one that fails is an error of spec `number`."""
    if spec.mask is None:
        return None
    try:
        words: NDArray[np.int32] = spec.mask.words()
    except EngineError as error:
        errors[number] = error
        return None
    return words


def _copy_rows(
    kernels: SamplingKernels,
    table: torch.Tensor,
    rows: NDArray[np.int64],
    masks: Sequence[NDArray[np.int32] | None],
    into: _Floats,
) -> None:
    """`rows` [N] of `table` as float32 [N, V]; -inf where the mask of a row has a 0."""
    if isinstance(kernels, CopiesRows):
        kernels.copies(table, rows, masks, into)
        return
    for row, words, target in zip(rows.tolist(), masks, into, strict=True):
        _copy_row(table, row, target)
        if words is not None:
            target[_zeros(words, target.size)] = -np.inf


def _copy_row(table: torch.Tensor, row: int, into: _Floats) -> None:
    """One row as float32. From host memory without torch, which would use more threads."""
    if table.device.type != "cpu":
        torch.from_numpy(into).copy_(table[row])
    elif table.dtype is torch.float32:
        into[:] = table.numpy()[row]
    else:
        bits = table.view(torch.int16).numpy()[row]
        np.left_shift(bits, 16, out=into.view(np.int32), dtype=np.int32)


def sampled(
    specs: Sequence[SampleSpec],
    items: ops.Items,
    errors: dict[int, EngineError],
    logprobs: dict[int, TokenLogprobs],
) -> list[Sampled]:
    """What was drawn, from items with `token` and `status`; errors, logprobs: by spec."""
    tokens, status = items["token"].tolist(), items["status"].tolist()
    if not errors and not logprobs and not any(status):
        return [Sampled(token) for token in tokens]
    found = []
    for i, (token, state) in enumerate(zip(tokens, status, strict=True)):
        error = errors.get(i)
        if error is None and state in _MESSAGES:
            param = _emptied(specs[i]) if state == ops.EMPTY else None
            error = EngineError(_MESSAGES[state], param)
        if error is None:
            found.append(Sampled(token, logprobs.get(i)))
        else:
            found.append(Sampled(-1, None, str(error), error.param))
    return found


def _emptied(spec: SampleSpec) -> str | None:
    """Which field of the request leaves no token to draw; None if it asks for no such thing."""
    params = spec.params
    excluding: dict[str, object] = {
        FIELD: spec.mask,
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": spec.bad_words,
        "min_tokens": spec.min_tokens_left,
        "logit_bias": params.logit_bias,
    }
    return next((name for name, asked in excluding.items() if asked), None)


def _requested_logprobs(
    kernels: SamplingKernels, table: torch.Tensor, specs: Sequence[SampleSpec], items: ops.Items
) -> dict[int, TokenLogprobs]:
    """{spec: log-probabilities} of those that request them and have a token."""
    asking = [
        i
        for i, (spec, token) in enumerate(zip(specs, items["token"].tolist(), strict=True))
        if spec.params.logprobs is not None and token >= 0
    ]
    if not asking:
        return {}
    wanted = logprob_items(specs, items, asking, table.shape[1])
    table = masked(table, specs, asking, wanted)
    entries = token_logprobs(wanted, kernels.logprobs(table, wanted))
    return {i: possible(entry, specs[i]) for i, entry in zip(asking, entries, strict=True)}


def masked(
    table: torch.Tensor,
    specs: Sequence[SampleSpec],
    asking: Sequence[int],
    wanted: ops.Items,
    send: Send | None = None,
) -> torch.Tensor:
    """The rows from which the log-probabilities of the specs `asking` are read: those of `table`,
    or copies in which the tokens that a grammar excludes are -inf. wanted: items of them, whose
    rows are changed with that. send: see `_close`."""
    masks: dict[int, NDArray[np.bool_]] = {}
    for n, i in enumerate(asking):
        if (mask := specs[i].mask) is not None:
            with suppress(EngineError):  # which `draw` has met, too: there is no token
                masks[n] = _closed(mask, table.shape[1])
    if not masks:
        return table
    rows = wanted["row"].copy()
    at = send("asking rows", rows) if send else torch.from_numpy(rows).to(table.device)
    copies = table[at].float()
    _close(copies, masks, send)
    wanted["row"] = range(len(asking))
    return copies


def possible(entry: TokenLogprobs, spec: SampleSpec) -> TokenLogprobs:
    """Without the alternatives that a grammar excludes."""
    if spec.mask is None:
        return entry
    end = 1 + sum(value > -np.inf for value in entry.logprobs[1:])
    return TokenLogprobs(entry.token_ids[:end], entry.logprobs[:end], entry.ranks[:end])


def logprob_items(
    specs: Sequence[SampleSpec], items: ops.Items, asking: Sequence[int], vocab: int
) -> ops.Items:
    """The items of the specs `asking` for the log-probabilities of their tokens."""
    wanted = items[list(asking)]
    wanted["top_k"] = [min(specs[i].params.logprobs or 0, vocab) for i in asking]
    return wanted


def token_logprobs(items: ops.Items, found: ops.Logprobs) -> list[TokenLogprobs]:
    """Of each item's `token` and of its `top_k` likeliest; found: what the kernels gave."""
    ids, values = found
    made = []
    for i, item in enumerate(items):
        k, rank = int(item["top_k"]), int(item["rank"])
        if item["status"] != ops.OK:
            made.append(TokenLogprobs((int(item["token"]),), (float("nan"),), (0,)))
            continue
        likeliest = slice(k + 1)
        made.append(
            TokenLogprobs(
                tuple(ids[i, likeliest].tolist()),
                tuple(values[i, likeliest].tolist()),
                (rank, *range(1, k + 1)),
            )
        )
    return made


def _adjust(row: _Floats, spec: SampleSpec) -> EngineError | None:
    """Apply everything up to the temperature to one row [V], in place; an error or None."""
    try:
        _process(row, spec)
    except IndexError:  # admission rejects such ids; here they must not affect other rows
        return _unknown_id(spec, row.size)
    return None


def _process(row: _Floats, spec: SampleSpec) -> None:
    params = spec.params
    if params.allowed_token_ids is not None:
        allowed = _index(params.allowed_token_ids)
        kept = row[allowed]
        row.fill(-np.inf)
        row[allowed] = kept
    for *before, last in spec.bad_words:  # masked where the output ends with all before it
        if not before or list(spec.output_ids[-len(before) :]) == before:
            row[last] = -np.inf
    if params.logit_bias:
        amounts = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        row[_index(params.logit_bias)] += amounts
    if params.repetition_penalty != 1.0:
        _penalize_repetition(row, spec, params.repetition_penalty)
    if params.frequency_penalty or params.presence_penalty:
        _penalize_output(row, spec.output_ids, params)
    if spec.min_tokens_left > 0 and spec.stop_ids:
        row[_index(spec.stop_ids)] = -np.inf


def _closed(mask: TokenMask, vocab: int) -> NDArray[np.bool_]:
    """bool [V]: where a token may not be drawn."""
    words = mask.words()
    if not words.size:  # it failed on the rank that has the grammar
        return np.ones(vocab, np.bool_)
    return _zeros(words, vocab)


def _zeros(words: NDArray[np.int32], vocab: int) -> NDArray[np.bool_]:
    """bool [V]: where a mask has a 0."""
    bits = np.unpackbits(words.view(np.uint8), count=vocab, bitorder="little")
    found: NDArray[np.bool_] = bits == 0
    return found


def _unknown_id(spec: SampleSpec, vocab_size: int) -> EngineError:
    named: dict[str, Iterable[int]] = {
        "allowed_token_ids": spec.params.allowed_token_ids or (),
        "bad_words": (token for word in spec.bad_words for token in word),
        "logit_bias": spec.params.logit_bias or (),
        "stop_token_ids": spec.stop_ids,
        "the prompt": spec.prompt_ids,
    }
    for name, ids in named.items():
        for token in ids:
            if token >= vocab_size:
                return EngineError(
                    f"{name} has token id {token}; the vocabulary has {vocab_size} tokens", name
                )
    return EngineError(f"a token id is outside the vocabulary of {vocab_size} tokens")


def _penalize_repetition(row: _Floats, spec: SampleSpec, penalty: float) -> None:
    """Each id of prompt and output, once: a positive logit is divided, a negative multiplied."""
    seen = _index({*spec.prompt_ids, *spec.output_ids})
    logits = row[seen].astype(np.float64)
    with np.errstate(over="ignore"):
        logits = np.where(logits > 0, logits / penalty, logits * penalty)
    # An extreme penalty must not produce +inf; -inf is a token that cannot be drawn.
    row[seen] = np.clip(logits, -np.inf, _FLOAT32_MAX)


def _penalize_output(row: _Floats, output_ids: Sequence[int], params: SamplingParams) -> None:
    """logit - frequency x occurrences - presence, for each id of the output."""
    counts = Counter(output_ids)
    times = np.fromiter(counts.values(), np.float32, len(counts))
    row[_index(counts)] -= params.frequency_penalty * times + params.presence_penalty


def _index(ids: Collection[int]) -> NDArray[np.int64]:
    """Token ids as an index array; several times faster than indexing with a list."""
    return np.fromiter(ids, np.int64, len(ids))
