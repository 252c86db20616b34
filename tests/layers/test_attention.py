"""What an attention layer passes to its backend."""

from typing import Any

import torch

from octavo.attention.base import AttentionSpec
from octavo.attention.torch_ref import TorchAttention
from octavo.kernels.dispatch import reference_ops
from octavo.layers.attention import Attention
from paging import metadata


def test_sinks_reach_the_backend() -> None:
    """With a sink far above every score, nothing of the values is left."""
    spec, backend = AttentionSpec(4, 2, 8, 0.3, sinks=True), TorchAttention()
    meta, ops = metadata([(3, 3)], 16), reference_ops("a test")
    shape, kind = backend.kv_layout(spec, 2, 16, torch.float32)
    x = torch.randn(3, 8 * (4 + 2 + 2))
    none: Any = torch.full((4,), -1e9)
    found = []
    for sinks in (none, torch.tensor([-1e9, 1e9, -1e9, -1e9])):
        layer = Attention(ops, backend, spec, lambda x: x, lambda x: x, None, sinks=sinks)
        found.append(layer.forward(x, meta, torch.zeros(shape, dtype=kind)).view(3, 4, 8))
    assert found[0].abs().sum() > 0
    assert not found[1][:, 1].any()
    assert torch.equal(found[0][:, [0, 2, 3]], found[1][:, [0, 2, 3]])
