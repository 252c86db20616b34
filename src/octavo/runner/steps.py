"""Graph capture: a model's layers captured by the device, for steps of few tokens.

Captured runs read what changes between steps from fixed addresses: the embedded tokens, their
positions and slots, and what the attention backend prepares. A capture is verified before it is
used, on a different step: it must give what an ordinary step gives, and the same bits where one
capture serves any number of tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from octavo.attention.base import AttentionMetadata, AttentionSpec, CaptureSafe
from octavo.core.plan import PlanRow, StepPlan
from octavo.dist.base import SINGLE, Group
from octavo.kernels.capture import CapturedRun, CaptureError, StepCapture
from octavo.log import get_logger
from octavo.models.decoder import Decoder
from octavo.runner.batch import BatchBuilder, StepInputs
from octavo.runner.kv_cache import KVCache
from octavo.runner.ranks import all_agree

logger = get_logger(__name__)

# Difference of two results, relative to their norm, that another order of sums may make.
_ROUNDING = {torch.float32: 1e-4}
_ROUNDING_HALF = 0.05
# Of the step that verifies a capture; that all numbers of rows give the same, kernels' tests show.
_VERIFIED_TOKENS = 5

Metas = Sequence[AttentionMetadata]


class StaticInputs:
    """The inputs of captured runs, for at most as many tokens as `largest` has."""

    def __init__(self, model: Decoder, largest: StepInputs) -> None:
        self._embed = model.embed
        self._padding_slot = model.backend.capabilities.padding_slot
        self.hidden = model.embed(largest.token_ids)
        self._metas = [
            replace(meta, positions=meta.positions.clone(), slots=meta.slots.clone())
            for meta in largest.metas
        ]
        self._loaded = len(self.hidden)

    def metas(self, inputs: StepInputs) -> list[AttentionMetadata]:
        """The metadata of `inputs`, with positions and slots in the static memory."""
        count = len(inputs.token_ids)
        return [
            replace(
                meta,
                positions=static.positions[:count],
                slots=static.slots[:count],
                captured=True,
            )
            for static, meta in zip(self._metas, inputs.metas, strict=True)
        ]

    def load(self, token_ids: torch.Tensor, metas: Metas) -> None:
        """Copy in the inputs of a step; tokens after them pad it."""
        count = len(token_ids)
        self._embed(token_ids, out=self.hidden[:count])
        for static, meta in zip(self._metas, metas, strict=True):
            static.positions[:count] = meta.positions
            static.slots[:count] = meta.slots
            if count < self._loaded:
                static.positions[count : self._loaded] = 0
                static.slots[count : self._loaded] = self._padding_slot
        self._loaded = count


class CapturedSteps:
    """A model's layers, captured for steps of up to `max_tokens` tokens."""

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        inputs: StaticInputs,
        runs: Mapping[int, CapturedRun],
    ) -> None:
        """runs: by the number of tokens that each was captured with, rising."""
        self._model, self._inputs, self._runs = model, inputs, runs
        self._kinds = _layer_kinds(model, cache)
        self.max_tokens, self.count = max(runs), len(runs)

    def forward(self, token_ids: torch.Tensor, metas: Metas) -> torch.Tensor | None:
        """As Decoder.forward; metas: one per KV group. The result is valid until the next step.

        None, and nothing was computed, for a step that no capture can replay.
        """
        count = len(token_ids)
        size = next((size for size in self._runs if size >= count), None)
        if size is None or not _prepare(
            self._model, self._kinds, metas, self._inputs.hidden.dtype, size
        ):
            return None
        self._inputs.load(token_ids, metas)
        return self._runs[size].replay(count)


@torch.inference_mode()
def capture_steps(
    device: StepCapture,
    model: Decoder,
    cache: KVCache,
    builder: BatchBuilder,
    max_tokens: int,
    group: Group = SINGLE,
) -> CapturedSteps | None:
    """Steps of up to `max_tokens` tokens, captured; None where the device or a layer cannot, on
    any rank of `group`.

    Overwrites the blocks from 1 on, which must be unused.
    """
    backend, sizes = model.backend, device.capture_sizes(max_tokens)
    if not (sizes and backend.capabilities.graph_safe and isinstance(backend, CaptureSafe)):
        return None
    inputs = StaticInputs(model, builder.build(_probe_step(sizes[-1], builder)))
    runs: dict[int, CapturedRun] = {}
    for size in reversed(sizes):  # the memory of the largest serves all
        step = builder.build(_probe_step(size, builder))
        reason = "another rank cannot"
        try:
            runs[size] = _capture(device, model, cache, inputs, step)
        except CaptureError as error:
            reason = str(error)
        if not all_agree(group, size in runs):
            logger.info("graph capture disabled: %s", reason)
            return None
    captured = CapturedSteps(model, cache, inputs, dict(sorted(runs.items())))
    padded = device.pads_steps
    for size in sizes:
        if not all_agree(group, _replays(captured, model, cache, builder, size, padded)):
            logger.warning("graph capture disabled: a replay differs from an ordinary step")
            return None
    return captured


def _capture(
    device: StepCapture,
    model: Decoder,
    cache: KVCache,
    inputs: StaticInputs,
    step: StepInputs,
) -> CapturedRun:
    inputs.load(step.token_ids, step.metas)
    metas, count = inputs.metas(step), len(step.token_ids)
    if not _prepare(model, _layer_kinds(model, cache), metas, inputs.hidden.dtype, count):
        raise CaptureError("the attention backend has too little static memory")
    per_layer = cache.per_layer(metas)
    return device.capture(lambda: model.layers(inputs.hidden[:count], per_layer, cache.layers))


def _layer_kinds(model: Decoder, cache: KVCache) -> list[tuple[int, AttentionSpec]]:
    """The KV group and the spec of each kind of layer."""
    groups = [group for group, _ in cache.layout.places]
    return list(dict.fromkeys(zip(groups, model.attention_specs, strict=True)))


def _prepare(
    model: Decoder,
    kinds: Sequence[tuple[int, AttentionSpec]],
    metas: Metas,
    dtype: torch.dtype,
    size: int,
) -> bool:
    backend = model.backend
    assert isinstance(backend, CaptureSafe)
    fits = [backend.prepare_replay(metas[group], spec, dtype, size) for group, spec in kinds]
    return all(fits)


def _replays(
    captured: CapturedSteps,
    model: Decoder,
    cache: KVCache,
    builder: BatchBuilder,
    size: int,
    padded: bool,
) -> bool:
    """Whether a replay gives what an ordinary step of at most `size` tokens gives.

    A padded step has products of more rows, which may be rounded in another order; stale inputs
    give quite other results. The tokens and positions differ from the captured ones, so that stale
    inputs are detected. Replays run first, also of the tokens before: an ordinary step might
    prepare what a replay should prepare itself.
    """
    count = max(1, min(size // 3, _VERIFIED_TOKENS))
    before = builder.build(_probe_step(count, builder))
    if captured.forward(before.token_ids, before.metas) is None:
        return False
    start = min(count, size - count)
    step = builder.build(_probe_step(count, builder, start, first_token=1))
    replayed = captured.forward(step.token_ids, step.metas)
    if replayed is None:
        return False
    replayed = replayed.clone()
    metas = cache.per_layer(step.metas)
    expected = model.forward(step.token_ids, metas, cache.layers)
    if not padded:
        return torch.equal(replayed, expected)
    distance = (replayed.float() - expected.float()).norm() / expected.float().norm()
    return bool(distance < _ROUNDING.get(expected.dtype, _ROUNDING_HALF))


def _probe_step(
    tokens: int, builder: BatchBuilder, start: int = 0, first_token: int = 0
) -> StepPlan:
    """A step of `tokens` tokens of one prompt, from `start` on, in the blocks from 1 on.

    All KV groups have the same blocks, so that they fit in any pool: what a layer reads from
    before `start` is then what the last group wrote, the same however the step is computed.
    """
    table = tuple(range(1, -(-(start + tokens) // builder.block_size) + 1))
    ids = tuple((first_token + i) % 7 for i in range(tokens))
    return StepPlan(0, (PlanRow("dummy", ids, start, (table,) * builder.num_groups, ()),))
