"""Loads a model, sizes its KV cache, and executes plans: the only caller of `forward`.

With tensor parallelism every rank has a runner, and executes the same plans: what it decides
itself (sizes, captures) is agreed on with the others, so that all call the group's operations
alike.
"""

import contextlib
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from octavo import devices, progress
from octavo.attention.base import AttentionBackend
from octavo.attention.registry import dtype_name
from octavo.config import EngineConfig
from octavo.core.plan import (
    FULL,
    PlanRow,
    RowResult,
    RunnerLimits,
    SampleSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
    draws,
    num_gained,
    resolved,
    row_result,
)
from octavo.dist.base import Single
from octavo.errors import ConfigError, EngineError, counted
from octavo.log import get_logger
from octavo.models.decoder import Decoder
from octavo.models.loader import Prepared, kv_dtype, load, prepare
from octavo.runner import step_memory
from octavo.runner.batch import BatchBuilder, StepInputs
from octavo.runner.device import (
    Accelerator,
    ComputesIn,
    Device,
    DrawsAhead,
    create_device,
)
from octavo.runner.draws import Draws, launch_prompt_logprobs
from octavo.runner.kv_cache import KVCache, kv_layout
from octavo.runner.memory import shown
from octavo.runner.out_of_memory import Parts, Results, Rows, at_start
from octavo.runner.probes import full_step, prompt_step, warm_up_steps
from octavo.runner.promises import Promises
from octavo.runner.ranks import ALONE, Ranks, all_agree, of_first
from octavo.runner.sampler import NOT_NUMBERS, Sampled, prompt_logprobs, sample
from octavo.runner.sizing import Needs, Sizing
from octavo.runner.steps import CapturedSteps, capture_steps
from octavo.version import __version__ as version

logger = get_logger(__name__)

T = TypeVar("T")
# The model's [tokens, H], and the inputs that it had.
Output = tuple[torch.Tensor, StepInputs]

# Attributes that hold tensors.
_HEAVY = ("_last", "captured", "cache", "builder", "model", "backend")


@dataclass(slots=True)
class _Launched:
    """A step that the device computes, or has computed.

    finish: waits for its results; None if the device had too little memory for all rows at once.
    drawn: where the device draws ahead, the tokens of its draws, int64 [draws, 2] on the device.
    result: once it was asked for.
    """

    step: int
    rows: Rows
    finish: Callable[[], Results | None] | None = None
    drawn: torch.Tensor | None = None
    result: StepResult | None = None


class ModelRunner:
    """One model on one device, or a rank's part of it. Raises ConfigError when it cannot be set
    up: before the ranks meet, where the description of the model tells.

    draws_everywhere: whether every rank draws the tokens of a step, which a device that works
    beside the host needs for the next one; else rank 0 alone does, and has the results.
    """

    def __init__(self, config: EngineConfig, ranks: Ranks = ALONE) -> None:
        began = time.perf_counter()
        self.config = config
        self.device: Device = create_device(config)
        self.dtype = resolve_dtype(config.dtype, self.device)
        self.captured: CapturedSteps | None = None
        self._last: _Launched | None = None
        alone = Single(ranks.rank, ranks.size)
        prepared = prepare(config, self.device, self.dtype, alone)
        self.kv_dtype = kv_dtype(config, self.dtype)
        self.backend: AttentionBackend = prepared.backend
        specs = prepared.attention_specs
        self.layout = kv_layout(self.backend, specs, config.block_size, self.kv_dtype)
        self._block_bytes = self.layout.block_bytes
        if self.layout.groups == (FULL,) and any(spec.window for spec in specs):
            logger.info("layers with a window cache all keys: the KV of layers differs in shape")
        self._ranks, self._group = ranks, ranks.connect(self.device.torch_device)
        if self._group.size > 1:
            prepared = replace(prepared, group=self._group)
            self._check_alike(prepared)
        sizing = self._begin_sizing(prepared)
        if ranks.rank == 0:
            self.device.start()  # only now: a mistake leaves no other process at work
        with self.device.loading(), at_start(self.device, *sizing.for_weights()):
            self.model: Decoder = load(prepared, config, self.device)
        loaded = time.perf_counter()
        self._accelerator = self.device if isinstance(self.device, Accelerator) else None
        self._draws_ahead = self.device if isinstance(self.device, DrawsAhead) else None
        # In parts, a rank would call other operations of the group than those with enough memory.
        in_parts = self._accelerator if self._group.size == 1 else None
        self._parts = Parts(in_parts) if in_parts else None
        self.draws_everywhere = self._accelerator is not None
        self._draws = ranks.rank == 0 or self.draws_everywhere
        self.runs_ahead = bool(self._accelerator and self._accelerator.runs_ahead)
        with (
            progress.phase("running a step to measure its memory"),
            at_start(self.device, *sizing.for_step()),
        ):
            self.limits = self._size(sizing)
        with at_start(self.device, *sizing.for_pool()):
            self.cache = self._make_cache(self.limits.num_blocks, self.limits.num_host_blocks)
            self.builder = self._make_builder(self.limits.max_model_len)
            with progress.phase("capturing steps"):
                self.captured = self._capture()
            with progress.phase("preparing to draw tokens"):
                self._warm_up()
        logger.info(
            "%s ready: %s, %s, KV %s, %d blocks of %d tokens = %d tokens "
            "(%.1f requests of %d); load %.2f s, sizing %.2f s",
            self.limits.model, self.limits.architecture, self.limits.dtype,
            self.limits.kv_cache_dtype, self.limits.num_blocks - 1, config.block_size,
            self.limits.kv_tokens, self.limits.kv_tokens / self.limits.max_model_len,
            self.limits.max_model_len, loaded - began, time.perf_counter() - loaded,
        )  # fmt: skip

    def execute(self, plan: StepPlan) -> StepResult:
        """Do the copies, run all rows through the model at once, then sample."""
        return self.submit(plan)()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step. See `engine.executor.Executor`.

        A device that draws ahead is given all of it at once, and takes tokens that the step
        before draws as they are drawn. On another one the step before is finished first.
        """
        rows, last, self._last = plan.rows, self._last, None
        if last and not self._may_follow(last):
            rows = self._resolved(rows, last)
        if plan.copies:
            self.cache.copy(plan.copies)
        step = _Launched(plan.step, rows)
        if not rows:
            step.result = StepResult(plan.step, ())
            return partial(self._finish, step)
        self._last = step
        if self._draws_ahead is None:
            output = self._whole(self._launch, rows)
            if output is not None:
                step.finish = partial(self._whole, partial(self._results, output), rows)
        elif not self._whole(lambda _: self._launch_with_draws(step, last), rows):
            step.rows, step.drawn, step.finish = self._resolved(step.rows, last), None, None
        return partial(self._finish, step)

    def _may_follow(self, last: _Launched) -> bool:
        """Whether a step can take tokens from `last` on the device."""
        return self._draws_ahead is not None and last.finish is not None and last.result is None

    def _resolved(self, rows: Rows, last: _Launched | None) -> Rows:
        """`rows` with the tokens that the step before drew, which is waited for."""
        if last is None:
            return rows
        before = self._finish(last)
        if not any(row.from_draw is not None for row in rows):
            return rows
        return resolved(rows, draws(last.rows, before.rows))

    @torch.inference_mode()
    def _finish(self, step: _Launched) -> StepResult:
        if step.result is None:
            if self._accelerator:
                self._accelerator.make_current()  # another thread may have launched it
            results = step.finish() if step.finish else None
            step.finish = None  # also where the step is computed again, in parts
            if results is None:
                assert self._parts
                results = self._parts(self._compute, step.rows)
            step.result = StepResult(step.step, results)
        return step.result

    def _whole(self, call: Callable[[Rows], T], rows: Rows) -> T | None:
        """None if the device is out of memory."""
        return self._parts.whole(call, rows) if self._parts else call(rows)

    def _compute(self, rows: Rows) -> Results:
        if self._draws_ahead is not None:
            step = _Launched(0, rows)
            self._launch_with_draws(step, None)
            assert step.finish
            return step.finish() or ()
        return self._results(self._launch(rows), rows)

    def _launch(self, rows: Rows, before: torch.Tensor | None = None) -> Output:
        """before: the tokens of the draws that rows follow."""
        inputs = self.builder.build(StepPlan(0, rows))
        if before is not None and self._draws_ahead is not None:
            self._draws_ahead.take_drawn(inputs.token_ids, before)
        hidden = None
        if self.captured:
            hidden = self.captured.forward(inputs.token_ids, inputs.metas)
        if hidden is None:
            metas = self.cache.per_layer(inputs.metas)
            hidden = self.model.forward(inputs.token_ids, metas, self.cache.layers)
        return hidden, inputs

    def _launch_with_draws(self, step: _Launched, last: _Launched | None) -> bool:
        """Launch all of a step. True: it was."""
        device = self._draws_ahead
        assert device is not None
        before = None
        if any(row.from_draw is not None for row in step.rows):
            before = last.drawn if last else None
            if before is None:  # the ids would be none of the vocabulary's
                raise EngineError(f"step {step.step} takes a token of a step that drew none")
        hidden, inputs = self._launch(step.rows, before)
        if any(row.from_draw is not None and _looks_back(row) for row in step.rows):
            # The step before is done, or nearly, while this one computes what it draws from.
            step.rows = self._resolved(step.rows, last)
        drawing = [row for row in step.rows if row.samples]
        made = Draws(device)
        if drawing:
            for logits, specs, owners in self._drawing(hidden[inputs.sample_index], drawing):
                made.launch(logits, specs, owners)
        prompts = self._prompt_logprobs(step.rows, hidden, partial(launch_prompt_logprobs, device))
        step.drawn, rows = made.tokens(), step.rows
        done = None if drawing else device.fetch(inputs.token_ids[:1])

        def finish() -> Results:
            if done:  # nothing is read; but the next step but one may not begin before
                done()
            read = {name: tuple(e for part in parts for e in part()) for name, parts in prompts}
            return _row_results(rows, iter(made.read()), read)

        step.finish = finish
        return True

    def _results(self, output: Output, rows: Rows) -> Results:
        hidden, inputs = output
        drawing = [row for row in rows if row.samples]
        if not drawing and self._accelerator:
            # Drawing waits for the device; else the next step would change inputs under it.
            self._accelerator.synchronize()
        take: Callable[[torch.Tensor, Sequence[int], int], Iterable[TokenLogprobs]]
        take = partial(prompt_logprobs, self.device) if self._draws else _none_of
        prompts = {
            name: tuple(entry for entries in parts for entry in entries)
            for name, parts in self._prompt_logprobs(rows, hidden, take)
        }
        if not self._draws:  # but its part of the logits is needed
            for _ in self._drawing(hidden[inputs.sample_index], drawing):
                pass
            return tuple(RowResult(row.request_id) for row in rows)
        return _row_results(rows, self._draw(hidden[inputs.sample_index], drawing), prompts)

    def explain(self) -> dict[str, str]:
        captured = self.captured
        steps = f"captured up to {captured.max_tokens} tokens" if captured else "not captured"
        found = {**self.model.explain(), "attention": self.backend.name, "steps": steps}
        if self._group.size > 1:
            found["tensor parallel"] = f"{self._group.size} ranks over {self._group.kind}"
        return found

    def _capture(self) -> CapturedSteps | None:
        config, limits = self.config, self.limits
        if config.enforce_eager:
            return None
        slots = (limits.num_blocks - 1) * limits.block_size
        most = min(config.max_num_batched_tokens, limits.max_model_len, slots)
        began = time.perf_counter()
        free = self._accelerator.memory().free if self._accelerator else 0
        captured = capture_steps(
            self.device, self.model, self.cache, self.builder, most, self._group
        )
        if captured and self._accelerator:
            logger.info(
                "graph capture: %s of up to %d tokens, %.1f s, %s",
                counted(captured.count, "size"), captured.max_tokens, time.perf_counter() - began,
                shown(free - self.device.memory().free),
            )  # fmt: skip
        return captured

    def _warm_up(self) -> None:
        """Run what is compiled when it is first launched, also by steps that are not captured."""
        if self._accelerator:
            slots = (self.limits.num_blocks - 1) * self.limits.block_size
            captured, self.captured = self.captured, None
            for plan in warm_up_steps(
                self._accelerator.warm_up_sizes,
                min(self.config.max_num_batched_tokens, self.limits.max_model_len, slots),
                self.config.max_num_seqs,
                self.limits.max_model_len,
                self.limits.block_size,
                len(self.layout.groups),
            ):
                # The last step of each size follows the one before it, which is not read before.
                result = self.submit(plan)
                if any(row.from_draw is not None for row in plan.rows):
                    result()
            self.captured = captured
        self.device.warm_up()

    def close(self) -> None:
        """Give the weights, the KV and what was captured back to the system. May be repeated."""
        held = [vars(self).pop(name, None) for name in _HEAVY]
        if any(part is not None for part in held):
            del held
            self.device.release()
        if "_promise" in vars(self):
            self._promise.release()

    def __del__(self) -> None:
        # Not where it has not begun to load, nor while modules are taken apart.
        if "device" in vars(self) and not sys.is_finalizing():
            self.close()

    def _draw(self, hidden: torch.Tensor, rows: list[PlanRow]) -> Iterator[Sampled]:
        """hidden: [sampled tokens, hidden]. A result per sample spec, in the plan's order."""
        for logits, specs, owners in self._drawing(hidden, rows):
            yield from sample(self.device, logits, specs, owners)

    def _drawing(
        self, hidden: torch.Tensor, rows: list[PlanRow]
    ) -> Iterator[tuple[torch.Tensor, list[SampleSpec], list[int] | None]]:
        """(logits, specs that draw from them, the row of each), in the plan's order."""
        count, groups = self._rows_of_logits, _specs_by_token(rows)
        for begin in range(0, len(groups), count):
            batch = groups[begin : begin + count]
            logits = self.model.logits(hidden[begin : begin + count])
            specs = [spec for group in batch for spec in group]
            if len(specs) == len(batch):
                yield logits, specs, None
            else:  # the choices of one prompt draw from one row of logits
                yield logits, specs, [i for i, group in enumerate(batch) for _ in group]

    def _prompt_logprobs(
        self,
        rows: Sequence[PlanRow],
        hidden: torch.Tensor,
        take: Callable[[torch.Tensor, Sequence[int], int], T],
    ) -> list[tuple[str, list[T]]]:
        """(request, `take` of logits, targets and k, for parts of them) of rows that ask."""
        found: list[tuple[str, list[T]]] = []
        begin, most = 0, self._rows_of_logits
        for row in rows:
            targets, k = row.prompt_targets, row.num_prompt_logprobs
            if k is not None and targets:
                parts = []
                for at in range(0, len(targets), most):
                    part = targets[at : at + most]
                    logits = self.model.logits(hidden[begin + at : begin + at + len(part)])
                    parts.append(take(logits, part, k))
                found.append((row.request_id, parts))
            begin += len(row.token_ids)
        return found

    @property
    def _rows_of_logits(self) -> int:
        """How many rows of logits are computed at once."""
        return max(1, step_memory.LOGITS_AT_ONCE // self.limits.vocab_size)

    def _begin_sizing(self, prepared: Prepared) -> Sizing:
        """Refuse what cannot fit, and promise this engine the memory of its weights."""
        config, shared = self.config, self.device.shares_host_memory
        self._promises = Promises.of_user() if shared else Promises(None)
        needs = Needs(
            self.layout.groups,
            self._block_bytes,
            config.max_model_len or prepared.spec.max_position,
        )
        with self._sizing_alone():
            others = self._promises.others(self._ranks.engine)
            for other in others:
                logger.info(
                    "the engine of %s (process %d) was promised %s, of which %s are not in use yet",
                    other.model, other.pid, shown(other.promised), shown(other.outstanding),
                )  # fmt: skip
            sizing = Sizing(
                config, needs, shared, self._promised(), prepared.can_keep_codes,
                self._ranks.here if shared else 1, config.data_parallel_size if shared else 1,
                self._unsized(),
            )  # fmt: skip
            memory, weights = self.device.memory(), prepared.weight_bytes
            sizing.check(memory, weights)
            self._promise = self._promises.make(
                config.model, weights, memory.used, self._ranks.engine, self._pool
            )
            all_agree(self._group, True)  # all have promised
        return sizing

    def _check_alike(self, prepared: Prepared) -> None:
        """Raise ConfigError unless all ranks will compute the same model in the same way."""
        alike = (
            version, prepared.spec, prepared.window, self.dtype, self.kv_dtype, self.layout.groups,
            self._block_bytes, self.backend.name, devices.kind(self.device.name),
        )  # fmt: skip
        found = zlib.crc32(repr(alike).encode())
        if not all_agree(self._group, of_first(self._group, found) == found):
            raise ConfigError(
                f"the ranks differ: rank {self._group.rank} has octavo {version}, "
                f"{dtype_name(self.dtype)}, KV {dtype_name(self.kv_dtype)}, attention "
                f"{self.backend.name}; give all machines the same files and version, and set dtype"
            )

    def _sizing_alone(self) -> contextlib.AbstractContextManager[None]:
        """No other engine decides what it takes meanwhile; rank 0 sees to it for all ranks."""
        return self._promises.sizing() if self._ranks.rank == 0 else contextlib.nullcontext()

    @property
    def _pool(self) -> int:
        """The web process, where it has several engines. That of a rank above 0 is its engine's,
        so the engine counts once."""
        return os.getppid() if self.config.data_parallel_size > 1 else 0

    def _unsized(self) -> int:
        """Of the engines of one web process, those that have not taken their part of the memory."""
        if not self._pool or not self.device.shares_host_memory:
            return 1
        others = self._promises.others(self._ranks.engine)
        sized = sum(other.sized and other.pool == self._pool for other in others)
        return of_first(self._group, max(1, self.config.data_parallel_size - sized))

    def _promised(self) -> int:
        """To other engines of this machine, as rank 0 sees it: this rank's part."""
        others = self._promises.others(self._ranks.engine)
        total = of_first(self._group, sum(other.outstanding for other in others))
        return total // self._ranks.here

    def _size(self, sizing: Sizing) -> RunnerLimits:
        """The final limits. Raises NotEnoughMemoryError, or ConfigError for a window too long."""
        with self._sizing_alone():
            self._promise.release()
            sizing = replace(sizing, promised=self._promised(), unsized=self._unsized())
            peak, captured = 0, 0
            if sizing.given is not None:
                division = sizing.take_given(self.device.memory(), sizing.given)
            else:
                peak = self._step_peak()
                captured = self._captured_bytes(peak)
                division = sizing.divide(self.device.memory(), peak, captured)
            pools = sizing.pools(division, self._group.min)
            held = pools.blocks + (0 if self.config.swap_path else pools.host_blocks)
            self._promise = self._promises.make(
                self.config.model,
                held * self._block_bytes + peak + captured,
                self.device.memory().used,
                self._ranks.engine,
                self._pool,
                sized=True,
            )
            all_agree(self._group, True)  # all have promised
        return self._bare_limits(pools.blocks + 1, pools.window, division.terms, pools.host_blocks)

    @torch.inference_mode()
    def _step_peak(self) -> int:
        """Memory that a full step needs: measured, or measured on a smaller step and extended.

        On a CPU a full step takes long, and activations grow with its tokens; logits are bounded
        by `LOGITS_AT_ONCE`. This is an ordinary step over an artificial plan, so it also compiles
        what the first request needs.
        """
        size, tokens = self.config.block_size, self.config.max_num_batched_tokens
        # Rotary tables only cover the window (`models.loader`).
        window = self.config.max_model_len or self.model.spec.max_position
        groups = len(self.layout.groups)
        if self._accelerator:
            plan = full_step(tokens, min(self.config.max_num_seqs, tokens), window, size, groups)
            self._make_pool_of(len(plan.rows[0].token_ids))
            return self.device.peak_of(lambda: self._compute(plan.rows))  # at once, or not at all
        spec, specs = self.model.spec, self.model.attention_specs
        shapes = type(self.model).parameter_shapes(spec).values()
        values = sum(map(math.prod, shapes)) // self._group.size
        probe = min(step_memory.probe_tokens(values), tokens, window)
        self._make_pool_of(probe)
        plan = prompt_step(probe, size, groups)
        peak = self.device.peak_of(lambda: self.execute(plan))
        logits = step_memory.logits_bytes(self.config.max_num_seqs, self.limits.vocab_size)
        each = step_memory.activation_bytes(spec, specs, self.dtype.itemsize, self._group.size)
        return step_memory.full_peak(peak, probe, tokens, each) + logits

    def _captured_bytes(self, peak: int) -> int:
        """What captured steps will hold on a device with memory of its own."""
        most = self.config.max_num_batched_tokens
        if not self._accelerator or self.config.enforce_eager:
            return 0
        longest = self.config.max_model_len or self.model.spec.max_position
        return step_memory.captured_bytes(
            self.backend, self.layout.kinds(self.model.attention_specs),
            self.device.capture_sizes(most), longest, peak, most,
        )  # fmt: skip

    def _make_pool_of(self, tokens: int) -> None:
        """What a step of sequences of `tokens` tokens needs, for a measurement."""
        blocks = -(-tokens // self.config.block_size)
        self.limits = self._bare_limits(blocks + 1, tokens)
        self.cache = self._make_cache(blocks + 1)
        self.builder = self._make_builder(blocks * self.config.block_size)

    def _bare_limits(
        self,
        num_blocks: int,
        max_model_len: int,
        terms: dict[str, int] | None = None,
        num_host_blocks: int = 0,
    ) -> RunnerLimits:
        spec, config = self.model.spec, self.config
        return RunnerLimits(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=config.block_size,
            block_bytes=self._block_bytes,
            kv_groups=self.layout.groups,
            max_model_len=max_model_len,
            vocab_size=spec.num_ids,
            eos_token_ids=spec.eos_token_ids,
            model=config.model,
            architecture=spec.architecture,
            dtype=dtype_name(self.dtype),
            kv_cache_dtype=dtype_name(self.kv_dtype),
            device=self.device.name,
            generation_defaults=dict(spec.generation_defaults),
            memory=terms or {},
        )

    def _make_cache(self, num_blocks: int, num_host_blocks: int = 0) -> KVCache:
        return KVCache(
            self.backend, self.model.attention_specs, num_blocks, self.config.block_size,
            self.kv_dtype, self.device, num_host_blocks, self.config.swap_path,
        )  # fmt: skip

    def _make_builder(self, max_model_len: int) -> BatchBuilder:
        blocks = -(-max_model_len // self.config.block_size)
        return BatchBuilder(self.config.block_size, blocks, self.device, len(self.layout.groups))


_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(name: str, device: ComputesIn) -> torch.dtype:
    """The torch type of the option `dtype`; `auto` is the device's choice."""
    if name == "auto":
        return device.default_dtype()
    dtype = _DTYPES[name]
    if dtype not in device.dtypes:
        logger.info("device %s computes %s in float32, which holds each of its values",
                    device.name, name)  # fmt: skip
        return torch.float32
    return dtype


def _specs_by_token(rows: list[PlanRow]) -> list[tuple[SampleSpec, ...]]:
    """For each sampled token, in order, the specs that draw from its logits."""
    groups: list[tuple[SampleSpec, ...]] = []
    for row in rows:
        if row.samples[0].offset:  # a spec for each draft, and one for the last token
            groups += [(spec,) for spec in row.samples]
        else:
            groups.append(row.samples)
    return groups


def _looks_back(row: PlanRow) -> bool:
    """Whether its draws look at the tokens before."""
    return any(spec.params.needs_history for spec in row.samples)


def _none_of(logits: torch.Tensor, targets: Sequence[int], k: int) -> list[TokenLogprobs]:
    """As `prompt_logprobs`, on a rank that draws nothing: it has computed its part of `logits`."""
    return []


def _row_results(
    rows: Rows, drawn: Iterator[Sampled], prompts: Mapping[str, tuple[TokenLogprobs, ...]]
) -> Results:
    return tuple(
        _row_result(row, [next(drawn) for _ in row.samples], prompts.get(row.request_id, ()))
        for row in rows
    )


def _row_result(row: PlanRow, drawn: list[Sampled], prompt: tuple[TokenLogprobs, ...]) -> RowResult:
    tokens = [d.token_id for d in drawn]
    # Draws after a rejected draft are not part of the answer, and may fail.
    failed = next((d for d in drawn[: num_gained(row, tokens)] if d.error), None)
    if any(entry.logprobs[0] != entry.logprobs[0] for entry in prompt):
        return RowResult(row.request_id, error=NOT_NUMBERS)
    if failed:
        return RowResult(row.request_id, error=failed.error, error_param=failed.error_param)
    return row_result(row, tokens, [d.logprobs for d in drawn], prompt)
