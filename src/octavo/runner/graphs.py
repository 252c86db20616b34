"""Captured steps: the whole decoder as one compiled call, for steps of few tokens.

Where every op of a model is a kernel of `kernels`, its calls are recorded once, at the largest
number of rows, and replayed for any number up to it. Nothing is trusted: a graph that does not
give the bits of the ordinary path on another step is not used.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.attention.base import AttentionMetadata, AttentionSpec, GraphSafe
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

    def __init__(
        self, model: Decoder, graph: Graph, recorded: Mapping[AttentionSpec, bytes]
    ) -> None:
        """recorded: attention's arguments of the recorded step, for each kind of layer."""
        self._model, self._graph, self._dtype = model, graph, graph.given.dtype
        self._recorded = recorded
        self.most = graph.rows

    def forward(self, token_ids: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        """As Decoder.forward; the result is valid until the next step."""
        backend = self._model.backend
        assert isinstance(backend, GraphSafe)
        rows = meta.num_tokens
        self._model.embed(token_ids, out=self._graph.given[:rows])
        now = {spec: backend.step_arguments(meta, spec, self._dtype) for spec in self._recorded}
        steps = {before: now[spec][0] for spec, before in self._recorded.items()}
        return self._graph.replay(rows, meta.positions.data_ptr(), meta.slots.data_ptr(), steps)


@torch.inference_mode()
def capture(
    model: Decoder, cache: KVCache, builder: BatchBuilder, most_tokens: int
) -> StepGraph | None:
    """A graph for steps of up to `most_tokens` tokens, or None where there can be none.

    Writes to the blocks from 1 on, which must not be in use.
    """
    backend, tokens = model.backend, min(most_tokens, _MOST_TOKENS)
    if not (backend.capabilities.graph_safe and isinstance(backend, GraphSafe)):
        return None
    if not openmp.team().is_exact(openmp.threads()):
        return None
    inputs = builder.build(_made_up(tokens, builder.block_size))
    given = model.embed(inputs.token_ids)
    recorded = {
        spec: backend.step_arguments(inputs.meta, spec, given.dtype)[0]
        for spec in dict.fromkeys(model.attention_specs)
    }
    with record() as recording, _Watch() as watch:
        result = model.layers(given, inputs.meta, cache.layers)
    positions, slots = inputs.meta.positions.data_ptr(), inputs.meta.slots.data_ptr()
    if watch.seen:
        logger.info("steps are not captured: %s is no kernel of ours", ", ".join(watch.seen))
        return None
    try:
        graph = Graph(recording, given, result, positions, slots)
    except ValueError as error:
        logger.info("steps are not captured: %s", error)
        return None
    found = StepGraph(model, graph, recorded)
    step = builder.build(_made_up(max(1, tokens // 3), builder.block_size, first_token=1))
    expected = model.forward(step.token_ids, step.meta, cache.layers)
    if not torch.equal(found.forward(step.token_ids, step.meta), expected):
        logger.warning("steps are not captured: a replay differs from an ordinary step")
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


def _made_up(tokens: int, block_size: int, first_token: int = 0) -> StepPlan:
    """A step of one prompt of `tokens` tokens in the blocks from 1 on."""
    table = tuple(range(1, -(-tokens // block_size) + 1))
    ids = tuple((first_token + i) % 7 for i in range(tokens))
    return StepPlan(0, (PlanRow("made up", ids, 0, table, ()),))
