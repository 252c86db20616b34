"""The token embedding: of values, whose tied head uses a packed copy, or of stored rows, whose
tied head uses the same (`layers.linear`)."""

import torch
import torch.nn.functional as F

from octavo.layers.linear import Table


class Embedding:
    """`weight` [vocabulary, H]: one row per token id.

    dtype: of the rows that are looked up; None: the weight's. scale: factor of the rows, rounded
    to their dtype first, as Gemma was trained.
    """

    __slots__ = ("_scale", "_type", "weight")

    def __init__(
        self, weight: torch.Tensor, scale: float = 1.0, dtype: torch.dtype | None = None
    ) -> None:
        self.weight, self._type = weight, dtype or weight.dtype
        self._scale = torch.tensor(scale, dtype=self._type).item()

    def forward(self, token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """int64 [T] -> [T, H], in `out` or a new tensor."""
        if self.weight.dtype != self._type:
            found = F.embedding(token_ids, self.weight)
            rows = found.to(self._type) if out is None else out.copy_(found)
        elif out is not None:
            rows = torch.index_select(self.weight, 0, token_ids, out=out)
        else:
            rows = F.embedding(token_ids, self.weight)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)


class StoredEmbedding:
    """The same of rows that are dequantized when they are looked up, and rounded to `dtype`."""

    __slots__ = ("_scale", "_table", "_type", "_width")

    def __init__(self, table: Table, width: int, dtype: torch.dtype, scale: float = 1.0) -> None:
        self._table, self._width, self._type = table, width, dtype
        self._scale = torch.tensor(scale, dtype=dtype).item()

    def forward(self, token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """int64 [T] -> [T, H], in `out` or a new tensor."""
        if out is None:
            out = torch.empty((len(token_ids), self._width), dtype=self._type)
        rows = self._table.rows(token_ids, out)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)
