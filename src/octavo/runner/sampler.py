"""Logits to tokens: a pure function of the logits and of each row's `SampleSpec`.

The order of processors: allowed ids and bad words, logit bias, repetition penalty, frequency and
presence penalties, the min-tokens mask; then temperature, top-k, top-p, min-p, and the draw.
Log-probabilities are those of the logits as they came, before all of that. How ties are broken
and where random numbers come from is said in `kernels.cpu_sampling`.

A row whose logits hold a NaN or +inf, or where nothing is left to draw, gets an error and
leaves the other rows as they are. A logit of -inf is a token that cannot be drawn.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.plan import SampleSpec, TokenLogprobs
from octavo.kernels import cpu_sampling as kernels
from octavo.params import SamplingParams

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float32]

_MASK_64 = 2**64 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)

# Rows with penalties, bias or masks are copied this many at a time: 3 MB of a vocabulary of 49,152
# stays in the processors' caches, and 64 such rows took 3 ms less than with one copy of all.
_GROUP = 16

_MESSAGES = {
    kernels.NOT_FINITE: "the model gave logits that are not numbers (NaN or infinity)",
    kernels.EMPTY: "no token is left to draw: allowed_token_ids, bad_words, min_tokens and the "
    "model's own masks exclude all of them",
}


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One drawn token; `token_id` is -1 when `error` says why there is none."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


def sample(
    logits: torch.Tensor, specs: Sequence[SampleSpec], rows: Sequence[int] | None = None
) -> list[Sampled]:
    """Draw one token for each spec.

    logits: [R, V], float32 or bfloat16; not changed. rows: the row of `logits` for each spec
    (choices of one prompt share a row); by default spec i draws from row i. Logits of another
    device are copied to the host.
    """
    if not specs:
        return []
    at = np.arange(len(specs)) if rows is None else np.asarray(rows, np.int64)
    table = logits.detach().to("cpu").contiguous()
    if table.dtype is torch.bfloat16:
        if all(_is_argmax(spec) for spec in specs):
            return _argmax_bf16(table, at)
        table = table.float()
    return _sample(table.numpy(), specs, at)


def prompt_logprobs(
    logits: torch.Tensor, targets: Sequence[int], k: int
) -> tuple[TokenLogprobs, ...]:
    """The log-probability of `targets[t]` under row t of `logits` [T, V], and the k likeliest.

    A row that holds NaN or +inf gives its target alone, with logprob NaN and rank 0.
    """
    if not targets:
        return ()
    table = logits.detach().to("cpu", torch.float32).contiguous().numpy()
    rows = np.arange(len(targets))
    counts = np.full(len(targets), min(k, table.shape[1]))
    return tuple(_token_logprobs(table, rows, np.asarray(targets, np.int64), counts))


def _is_argmax(spec: SampleSpec) -> bool:
    params = spec.params
    return params.greedy and params.logprobs is None and not _adjusts(spec)


def _adjusts(spec: SampleSpec) -> bool:
    """Whether anything changes this row's logits before temperature and filters."""
    params = spec.params
    return bool(
        params.needs_history
        or spec.bad_words
        or params.logit_bias
        or params.allowed_token_ids is not None
        or (spec.min_tokens_left > 0 and spec.stop_ids)
    )


def _argmax_bf16(table: torch.Tensor, rows: _Ints) -> list[Sampled]:
    tokens, status = np.empty(rows.size, np.int64), np.empty(rows.size, np.int64)
    kernels.argmax_rows_bf16(table.view(torch.int16).numpy(), rows, tokens, status)
    return _sampled(tokens, status, {}, {})


def _sample(table: _Floats, specs: Sequence[SampleSpec], rows: _Ints) -> list[Sampled]:
    adjusted = [i for i, spec in enumerate(specs) if _adjusts(spec)]
    if not adjusted:
        tokens, status = _draw(table, specs, rows)
        return _sampled(tokens, status, {}, _asked_logprobs(table, specs, rows, tokens))
    tokens, status = np.empty(len(specs), np.int64), np.empty(len(specs), np.int64)
    plain = sorted(set(range(len(specs))) - set(adjusted))
    if plain:
        tokens[plain], status[plain] = _draw(table, [specs[i] for i in plain], rows[plain])
    errors: dict[int, str] = {}
    copies = np.empty((min(_GROUP, len(adjusted)), table.shape[1]), np.float32)
    for begin in range(0, len(adjusted), _GROUP):
        group = adjusted[begin : begin + _GROUP]
        for row, i in zip(copies, group, strict=False):
            row[:] = table[rows[i]]
            if error := _adjust(row, specs[i]):
                errors[i] = error
        drawn = _draw(copies, [specs[i] for i in group], np.arange(len(group)))
        tokens[group], status[group] = drawn
    return _sampled(tokens, status, errors, _asked_logprobs(table, specs, rows, tokens))


def _draw(table: _Floats, specs: Sequence[SampleSpec], rows: _Ints) -> tuple[_Ints, _Ints]:
    """(tokens, status), each [N]."""
    tokens, status = np.empty(len(specs), np.int64), np.empty(len(specs), np.int64)
    params = [spec.params for spec in specs]
    reals = [(p.temperature, p.top_p, p.min_p) for p in params]
    whole = [(p.top_k, s.index, s.position) for p, s in zip(params, specs, strict=True)]
    seeds = [spec.seed & _MASK_64 for spec in specs]
    kernels.draw_rows(
        table,
        rows,
        np.array(reals, np.float64),
        np.array(whole, np.int64),
        np.array(seeds, np.uint64),
        tokens,
        status,
    )
    return tokens, status


def _sampled(
    tokens: _Ints, status: _Ints, errors: dict[int, str], logprobs: dict[int, TokenLogprobs]
) -> list[Sampled]:
    if not errors and not logprobs and not status.any():
        return [Sampled(token) for token in tokens.tolist()]
    found = []
    for i, (token, state) in enumerate(zip(tokens.tolist(), status.tolist(), strict=True)):
        error = errors.get(i) or _MESSAGES.get(state)
        found.append(Sampled(-1, None, error) if error else Sampled(token, logprobs.get(i)))
    return found


def _asked_logprobs(
    table: _Floats, specs: Sequence[SampleSpec], rows: _Ints, tokens: _Ints
) -> dict[int, TokenLogprobs]:
    asking = [
        i for i, spec in enumerate(specs) if spec.params.logprobs is not None and tokens[i] >= 0
    ]
    if not asking:
        return {}
    counts = np.array([min(specs[i].params.logprobs or 0, table.shape[1]) for i in asking])
    entries = _token_logprobs(table, rows[asking], tokens[asking], counts)
    return dict(zip(asking, entries, strict=True))


def _token_logprobs(
    table: _Floats, rows: _Ints, tokens: _Ints, counts: _Ints
) -> list[TokenLogprobs]:
    shape = (rows.size, 1 + int(counts.max()))
    ids, values = np.zeros(shape, np.int64), np.full(shape, np.nan)
    ranks, status = np.zeros(rows.size, np.int64), np.zeros(rows.size, np.int64)
    kernels.logprob_rows(table, rows, tokens, counts, ids, values, ranks, status)
    found = []
    for i, k in enumerate(counts.tolist()):
        if status[i] != kernels.OK:
            found.append(TokenLogprobs((int(tokens[i]),), (float("nan"),), (0,)))
            continue
        found.append(
            TokenLogprobs(
                tuple(ids[i, : k + 1].tolist()),
                tuple(values[i, : k + 1].tolist()),
                (int(ranks[i]), *range(1, k + 1)),
            )
        )
    return found


def _adjust(row: _Floats, spec: SampleSpec) -> str | None:
    """Apply everything up to the temperature to one row [V], in place; an error or None."""
    try:
        _process(row, spec)
    except IndexError:  # admission refuses such ids; here they must not touch other rows
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


def _unknown_id(spec: SampleSpec, vocab_size: int) -> str:
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
                return f"{name} has token id {token}; the vocabulary has {vocab_size} tokens"
    return f"a token id is outside the vocabulary of {vocab_size} tokens"


def _penalize_repetition(row: _Floats, spec: SampleSpec, penalty: float) -> None:
    """Each id of prompt and output, once: a positive logit is divided, a negative multiplied."""
    seen = _index({*spec.prompt_ids, *spec.output_ids})
    logits = row[seen].astype(np.float64)
    with np.errstate(over="ignore"):
        logits = np.where(logits > 0, logits / penalty, logits * penalty)
    # An extreme penalty must not make +inf of a number; -inf is a token that cannot be drawn.
    row[seen] = np.clip(logits, -np.inf, _FLOAT32_MAX)


def _penalize_output(row: _Floats, output_ids: Sequence[int], params: SamplingParams) -> None:
    """logit - frequency x occurrences - presence, for each id of the output."""
    counts = Counter(output_ids)
    times = np.fromiter(counts.values(), np.float32, len(counts))
    row[_index(counts)] -= params.frequency_penalty * times + params.presence_penalty


def _index(ids: Collection[int]) -> _Ints:
    """Token ids as an index array; several times faster than to index with a list."""
    return np.fromiter(ids, np.int64, len(ids))
