"""Captured steps: the whole decoder as one compiled call, for steps of few tokens.

Where every op of a model is a kernel of `kernels`, its calls are recorded once, at the largest
number of rows, and replayed for any number up to it. Nothing is trusted: a graph that does not
give the bits of the ordinary path on another step is not used.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.attention.base import AttentionMetadata, CaptureSafe
from octavo.core.plan import PlanRow, StepPlan
from octavo.kernels.cpu import openmp
from octavo.kernels.cpu.graph import Graph
from octavo.kernels.cpu.kernel import record
from octavo.log import get_logger
from octavo.models.decoder import Decoder
from octavo.runner.batch import BatchBuilder
from octavo.runner.kv_cache import KVCache

logger = get_logger(__name__)

_MOST_TOKENS = 256  # from here on a step takes long beside what its calls cost


class StepGraph:
    """The captured steps of one model, for up to `most` tokens."""

    def __init__(self, model: Decoder, graph: Graph, captured: AttentionMetadata) -> None:
        """captured: the metadata that was recorded; its positions and slots are static inputs."""
        self._model, self._graph, self._dtype = model, graph, graph.given.dtype
        self._positions, self._slots = captured.positions, captured.slots
        self.most = graph.rows

    def forward(self, token_ids: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """As Decoder.forward; the result is valid until the next step."""
        rows = meta.num_tokens
        self._model.embed(token_ids, out=self._graph.given[:rows])
        self._positions[:rows] = meta.positions
        self._slots[:rows] = meta.slots
        _prepare(self._model, meta, self._dtype)
        return self._graph.replay(rows)


def _prepare(model: Decoder, meta: AttentionMetadata, dtype: torch.dtype) -> None:
    assert isinstance(model.backend, CaptureSafe)
    for spec in dict.fromkeys(model.attention_specs):
        model.backend.prepare_replay(meta, spec, dtype)


@torch.inference_mode()
def capture(
    model: Decoder, cache: KVCache, builder: BatchBuilder, most_tokens: int
) -> StepGraph | None:
    """A graph for steps of up to `most_tokens` tokens, or None where there can be none.

    Writes to the blocks from 1 on, which must not be in use.
    """
    backend, tokens = model.backend, min(most_tokens, _MOST_TOKENS)
    if not (backend.capabilities.graph_safe and isinstance(backend, CaptureSafe)):
        return None
    if not openmp.team().is_exact(openmp.threads()):
        return None
    inputs = builder.build(_made_up(tokens, builder.block_size))
    given = model.embed(inputs.token_ids)
    _prepare(model, inputs.meta, given.dtype)
    with record() as recording, _Watch() as watch:
        result = model.layers(given, inputs.meta, cache.layers)
    if watch.seen:
        logger.info("graph capture disabled: %s has no capturable kernel", ", ".join(watch.seen))
        return None
    try:
        graph = Graph(recording, given, result)
    except ValueError as error:
        logger.info("graph capture disabled: %s", error)
        return None
    found = StepGraph(model, graph, inputs.meta)
    # Other tokens at other positions, so that whatever a replay takes from the recording shows.
    part = tokens // 3
    step = builder.build(_made_up(max(1, part), builder.block_size, start=part, first_token=1))
    replayed = found.forward(step.token_ids, step.meta).clone()
    if not torch.equal(replayed, model.forward(step.token_ids, step.meta, cache.layers)):
        logger.warning("graph capture disabled: a replay differs from an ordinary step")
        return None
    return found


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes torch's own ops but those that only make or view memory: they are not recorded."""

    _HARMLESS = frozenset(("empty", "view", "split_with_sizes", "slice", "detach"))

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Asked by torch. Else it wraps us in a guard that imports its compiler: 1.5 s of a start.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in self._HARMLESS:
            self.seen[name] = None
        return func(*args, **(kwargs or {}))


def _made_up(tokens: int, block_size: int, start: int = 0, first_token: int = 0) -> StepPlan:
    """A step of `tokens` tokens of one prompt, from `start` on, in the blocks from 1 on."""
    table = tuple(range(1, -(-(start + tokens) // block_size) + 1))
    ids = tuple((first_token + i) % 7 for i in range(tokens))
    return StepPlan(0, (PlanRow("made up", ids, start, table, ()),))
