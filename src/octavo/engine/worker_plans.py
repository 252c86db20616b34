"""Plans as bytes: what changes from one step to the next, and little else.

A plan of 128 long requests repeats the block tables and the sampling parameters of the plan before,
some 2 MB, which would take longer to read than a step takes on a GPU. So writer and reader both
remember the rows of the last plan, by their request: of a block table only what follows the part
that is the same is sent, and of the sampling parameters nothing while they are the same object.
Ranks that do not draw are only told how many tokens are drawn, and from which positions.
"""

from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import BlockCopy, PlanRow, SampleSpec, StepPlan, TokenMask
from octavo.errors import EngineError
from octavo.params import SamplingParams

T = TypeVar("T")


class Cut(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tuple of ids: the first `kept` of the one before, then `tail`."""

    kept: int
    tail: tuple[int, ...] = ()


class SentSample(msgspec.Struct, array_like=True, frozen=True, gc=False, omit_defaults=True):
    """A SampleSpec; `constants` is None for those of the row's sample of this number before."""

    offset: int
    seed: int = 0
    index: int = 0
    position: int = 0
    min_tokens_left: int = 0
    output: Cut = Cut(0)
    constants: "Constants | None" = None
    mask: bytes | None = None


class Constants(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What of a SampleSpec stays the same while its request runs."""

    params: SamplingParams
    prompt_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]


class SentRow(msgspec.Struct, array_like=True, frozen=True, gc=False, omit_defaults=True):
    """A PlanRow."""

    request_id: str
    token_ids: tuple[int, ...]
    start: int
    tables: tuple[Cut, ...]
    samples: tuple[SentSample, ...] = ()
    num_prompt_logprobs: int | None = None
    prompt_targets: tuple[int, ...] = ()
    from_draw: int | None = None


class SentPlan(msgspec.Struct, array_like=True, frozen=True, gc=False, omit_defaults=True):
    """A StepPlan."""

    step: int
    rows: tuple[SentRow, ...]
    copies: tuple[BlockCopy, ...] = ()


class PlanWriter:
    """with_draws: whether the readers draw tokens."""

    def __init__(self, with_draws: bool) -> None:
        self._with_draws = with_draws
        self._last: dict[str, PlanRow] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def write(self, plan: StepPlan) -> bytes:
        """Of each plan once, in order: the reader needs all of them."""
        sent = SentPlan(plan.step, tuple([self._row(row) for row in plan.rows]), plan.copies)
        self._last = {row.request_id: row for row in plan.rows}
        return self._encoder.encode(sent)

    def _row(self, row: PlanRow) -> SentRow:
        last = self._last.get(row.request_id)
        if last is None:
            tables = [Cut(0, table) for table in row.block_ids]
        else:
            pairs = zip(last.block_ids, row.block_ids, strict=True)
            tables = [_cut(before, now) for before, now in pairs]
        specs = last.samples if last is not None else ()
        samples = [self._sample(spec, _at(specs, i)) for i, spec in enumerate(row.samples)]
        return SentRow(
            row.request_id, row.token_ids, row.start, tuple(tables), tuple(samples),
            row.num_prompt_logprobs, row.prompt_targets, row.from_draw,
        )  # fmt: skip

    def _sample(self, spec: SampleSpec, last: SampleSpec | None) -> SentSample:
        if not self._with_draws:
            return SentSample(spec.offset)
        same = last is not None and _same_constants(last, spec)
        return SentSample(
            spec.offset, spec.seed, spec.index, spec.position, spec.min_tokens_left,
            _cut(last.output_ids if last is not None else (), spec.output_ids),
            None if same else Constants(
                spec.params, spec.prompt_ids, spec.stop_ids, spec.bad_words
            ),
            None if spec.mask is None else _bytes_of(spec.mask),
        )  # fmt: skip


class PlanReader:
    """Reads what one writer wrote, all of it and in order."""

    def __init__(self) -> None:
        self._last: dict[str, PlanRow] = {}
        self._decoder = msgspec.msgpack.Decoder(SentPlan)

    def read(self, data: bytes) -> StepPlan:
        sent = self._decoder.decode(data)
        rows = tuple([self._row(row) for row in sent.rows])
        self._last = {row.request_id: row for row in rows}
        return StepPlan(sent.step, rows, sent.copies)

    def _row(self, sent: SentRow) -> PlanRow:
        last = self._last.get(sent.request_id)
        if last is None:
            blocks = tuple([cut.tail for cut in sent.tables])
        else:
            pairs = zip(last.block_ids, sent.tables, strict=True)
            blocks = tuple([_joined(before, cut) for before, cut in pairs])
            # The runner compares tables by identity.
            if all(a is b for a, b in zip(blocks, last.block_ids, strict=True)):
                blocks = last.block_ids
        specs = last.samples if last is not None else ()
        return PlanRow(
            sent.request_id, sent.token_ids, sent.start, blocks,
            tuple([_sample(one, _at(specs, i)) for i, one in enumerate(sent.samples)]),
            sent.num_prompt_logprobs, sent.prompt_targets, sent.from_draw,
        )  # fmt: skip


# What ranks that do not draw need none of.
_NO_DRAW = SamplingParams()


def _sample(sent: SentSample, last: SampleSpec | None) -> SampleSpec:
    constants = sent.constants
    if constants is None and last is None:
        return SampleSpec(_NO_DRAW, 0, 0, 0, offset=sent.offset)
    if constants is None:
        assert last is not None
        constants = Constants(last.params, last.prompt_ids, last.stop_ids, last.bad_words)
    return SampleSpec(
        constants.params, sent.seed, sent.index, sent.position, constants.prompt_ids,
        _joined(last.output_ids if last is not None else (), sent.output), sent.min_tokens_left,
        constants.stop_ids, constants.bad_words, sent.offset,
        None if sent.mask is None else SentMask(sent.mask),
    )  # fmt: skip


class SentMask:
    """A TokenMask that was read."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def words(self) -> NDArray[np.int32]:
        """See TokenMask."""
        return np.frombuffer(self._data, np.int32)


def _bytes_of(mask: TokenMask) -> bytes:
    """Empty where the mask fails, which is an error of its row where it is drawn here."""
    try:
        return bytes(mask.words().tobytes())
    except EngineError:
        return b""


def _same_constants(one: SampleSpec, other: SampleSpec) -> bool:
    """Parameters by identity, of which a comparison would take long; the others are mostly equal
    by identity, too, which makes theirs quick."""
    return (
        one.params is other.params
        and one.prompt_ids == other.prompt_ids
        and one.stop_ids == other.stop_ids
        and one.bad_words == other.bad_words
    )


def _cut(before: tuple[int, ...], now: tuple[int, ...]) -> Cut:
    if before is now or now[: len(before)] == before:
        return Cut(len(before), now[len(before) :])
    return Cut(0, now)


def _joined(before: tuple[int, ...], cut: Cut) -> tuple[int, ...]:
    if cut.kept == len(before) and not cut.tail:
        return before
    return (*before[: cut.kept], *cut.tail)


def _at(items: tuple[T, ...], index: int) -> T | None:
    return items[index] if index < len(items) else None
