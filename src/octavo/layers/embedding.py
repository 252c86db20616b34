"""The token embedding. A tied head uses its own packed copy (`layers.linear`)."""

import torch
import torch.nn.functional as F


class Embedding:
    """`weight` [vocabulary, H]: one row per token id.

    scale: factor of the rows, rounded to the weight's dtype first, as Gemma was trained.
    """

    __slots__ = ("_scale", "weight")

    def __init__(self, weight: torch.Tensor, scale: float = 1.0) -> None:
        self.weight = weight
        self._scale = torch.tensor(scale, dtype=weight.dtype).item()

    def forward(self, token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """int64 [T] -> [T, H], in `out` or a new tensor."""
        if out is not None:
            rows = torch.index_select(self.weight, 0, token_ids, out=out)
        else:
            rows = F.embedding(token_ids, self.weight)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)
