"""Artificial plans: steps that are run to measure memory, or to compile what serving needs.

Their rows write to the same blocks, from 1 on, which must be unused.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from octavo.core.plan import NOT_DRAWN, PlanRow, SampleSpec, StepPlan
from octavo.params import SamplingParams

_GREEDY = SamplingParams(temperature=0)
_PLAIN = SamplingParams(temperature=1)
# One for each way in which tokens are drawn. The first one is alone in a step, and so draws from
# the logits themselves, not from copies with penalties.
_DRAWS = (
    _PLAIN,
    _GREEDY,
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1),
)


def prompt_step(tokens: int, block_size: int, num_groups: int) -> StepPlan:
    """A prompt of `tokens` tokens, after which the likeliest one is drawn."""
    return StepPlan(0, (_row("probe", tokens, block_size, num_groups, _GREEDY),))


def full_step(tokens: int, rows: int, window: int, block_size: int, num_groups: int) -> StepPlan:
    """The largest step: `rows` rows, each of which draws, of `tokens` tokens in all, or as many as
    fit in the window."""
    shares = [tokens // rows + (row < tokens % rows) for row in range(rows)]
    return StepPlan(
        0,
        tuple(
            _row(f"probe {row}", min(share, window), block_size, num_groups, _PLAIN)
            for row, share in enumerate(shares)
            if share
        ),
    )


def warm_up_steps(
    sizes: Sequence[int],
    most_tokens: int,
    most_rows: int,
    longest: int,
    block_size: int,
    num_groups: int,
) -> Iterator[StepPlan]:
    """Steps of each size that fits: of one prompt, of as many rows of one token, and of a token
    that the step before draws, far behind in a sequence of up to `longest` tokens."""
    for size in sorted({min(size, most_tokens) for size in sizes}):
        yield prompt_step(size, block_size, num_groups)
        rows = min(size, most_rows)
        draws = (_DRAWS[row % len(_DRAWS)] for row in range(rows))
        yield StepPlan(
            0, tuple(_row(f"{n}", 1, block_size, num_groups, draw) for n, draw in enumerate(draws))
        )
        yield StepPlan(0, (_far_row(longest, block_size, num_groups),))


def _row(
    name: str, tokens: int, block_size: int, num_groups: int, params: SamplingParams
) -> PlanRow:
    table = tuple(range(1, -(-tokens // block_size) + 1))
    ids = (0,) * tokens
    spec = SampleSpec(params, seed=0, index=0, position=0)
    return PlanRow(name, ids, 0, (table,) * num_groups, (spec,))


def _far_row(longest: int, block_size: int, num_groups: int) -> PlanRow:
    """The token of the first draw of the step before, at a power of two: where attention divides
    the keys, it does so there."""
    start = 1 << (longest - 1).bit_length() - 1 if longest > 1 else 0
    table = (1,) * (start // block_size + 1)
    row = _row("0", 1, block_size, num_groups, _PLAIN)
    return replace(
        row, token_ids=(NOT_DRAWN,), start=start, block_ids=(table,) * num_groups, from_draw=0
    )
