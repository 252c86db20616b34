"""The token table. A tied head multiplies with its own, packed copy (`layers.linear`)."""

import torch
import torch.nn.functional as F


class Embedding:
    """`weight` [vocabulary, H]: one row per token id."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] -> [T, H], a new tensor."""
        return F.embedding(token_ids, self.weight)
