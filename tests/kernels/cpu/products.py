"""Weights, and a product that is not batch-invariant, for the tests of what finds that out."""

import torch

from octavo.kernels.cpu.batch_invariant import Product


def weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)


def flawed(w: torch.Tensor, bad: set[int]) -> Product:
    """A product that sums in another order at the row counts in `bad`."""

    def product(x: torch.Tensor) -> torch.Tensor:
        wide, ours, half = x.float(), w.float(), x.shape[1] // 2
        if len(x) in bad:
            out = [ours[:, :half] @ row[:half] + ours[:, half:] @ row[half:] for row in wide]
        else:
            out = [ours @ row for row in wide]
        return torch.stack(out).to(x.dtype)

    return product
