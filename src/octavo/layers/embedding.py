"""The token table. A tied head multiplies with its own, packed copy (`layers.linear`)."""

import torch
import torch.nn.functional as F


class Embedding:
    """`weight` [vocabulary, H]: one row per token id."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def forward(self, token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """int64 [T] -> [T, H], in `out` or a new tensor."""
        if out is not None:
            return torch.index_select(self.weight, 0, token_ids, out=out)
        return F.embedding(token_ids, self.weight)
