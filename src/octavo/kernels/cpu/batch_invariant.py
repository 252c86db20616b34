"""Row counts at which a library's GEMM is batch-invariant.

A library chooses its blocking, and with it the order of summation, by the number of rows. So that
a row's bits do not depend on the batch, a GEMM is called with a padded or split row count wherever
the count itself would change them.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

# x [rows, in_features] -> [rows, out_features]
Product = Callable[[torch.Tensor], torch.Tensor]

_CANONICAL = 64  # the row count whose bits are the reference, and the smallest split size
# Split sizes to try, largest first: on AMX multiples of 300 agree with small counts most often.
_SPLITS = (900, 600, 300, 256, 128, _CANONICAL)
_SPLIT_PER_THREAD = 128  # rows from which a thread works at full speed
_PROBE_ROWS = 16
_PROBE_COLUMNS = 16


class BatchInvariantRows(dict[int, int]):
    """Row count -> the row count at which GEMMs of one shape keep the bits of each row.

    A larger number: pad to it. A smaller one: split into slices of it. Found by trying each
    count once, on inputs whose outputs cancel to their rounding errors, so that any other order
    of summation shows in the bits.
    """

    _product: Product
    _inputs: torch.Tensor
    _expected: torch.Tensor

    def __init__(self, product: Product, weight: torch.Tensor) -> None:
        super().__init__()
        self._max_rows = 0
        self.probe(product, weight)

    def probe(self, product: Product, weight: torch.Tensor) -> None:
        """Probe with `product` of `weight`; inconclusive if the rows of the weight are zero."""
        self._product = product
        self._inputs = cancelling_inputs(weight)
        self._expected = self._repeated(_CANONICAL)[:_PROBE_ROWS]
        self.inconclusive = not bool(self._expected.any())

    def is_affordable(self, max_rows: int = 0) -> bool:
        """Whether steps of up to `max_rows` need at most a quarter more rows, or large splits.

        The largest count asked for so far is remembered.
        """
        self._max_rows = max(self._max_rows, max_rows)
        split = _SPLIT_PER_THREAD * torch.get_num_threads()
        counts = [n for n in (256, self._max_rows) if _CANONICAL < n <= self._max_rows]
        return all(min(n, split) <= self[n] <= n + n // 4 for n in counts)

    def __missing__(self, rows: int) -> int:
        found = rows
        if not self._agrees(rows):
            found = next((n for n in _paddings(rows) if self._agrees(n)), 0)
        if not found:
            found = next(n for n in _SPLITS if n == _CANONICAL or (n < rows and self._agrees(n)))
        self[rows] = found
        return found

    def _repeated(self, rows: int) -> torch.Tensor:
        """The product of `rows` rows: the probe inputs over and over."""
        repeats = -(-rows // _PROBE_ROWS)
        return self._product(self._inputs.repeat(repeats, 1)[:rows])

    def _agrees(self, rows: int) -> bool:
        found = self._repeated(rows)
        whole = rows - rows % _PROBE_ROWS
        body, tail = found[:whole].view(-1, *self._expected.shape), found[whole:]
        same = torch.equal(body, self._expected.expand_as(body))
        return same and torch.equal(tail, self._expected[: len(tail)])


def batch_invariant(product: Product, counts: BatchInvariantRows) -> Product:
    """`product`, called with padded or split row counts where `counts` says so."""
    return functools.partial(_padded_or_split, product, counts)


# Not a closure: one that calls itself is a reference cycle, and would hold its weight until the
# next garbage collection.
def _padded_or_split(product: Product, counts: BatchInvariantRows, x: torch.Tensor) -> torch.Tensor:
    rows = x.shape[0]
    count = counts[rows]
    if count == rows:
        return product(x)
    if count > rows:
        return product(F.pad(x, (0, 0, 0, count - rows)))[:rows]
    parts = [_padded_or_split(product, counts, part) for part in torch.split(x, count)]
    return torch.cat(parts)


def cancelling_inputs(weight: torch.Tensor) -> torch.Tensor:
    """Inputs [16, K] whose products with 16 rows of `weight` [N, K] nearly vanish.

    In bf16 a sum's rounding error is far below the last bit of its result, unless the result is
    tiny relative to its terms. So random values fill one third of the columns; the second and last
    third are solved to cancel the remainder of the columns before them.
    """
    n, k = weight.shape
    generator = torch.Generator().manual_seed(k)
    first, *others = torch.randperm(k, generator=generator).tensor_split(3)
    rows = torch.linspace(0, n - 1, min(_PROBE_COLUMNS, n, max(1, k // 6))).long()
    target = weight[rows].cpu().double().nan_to_num(0, 0, 0)
    inputs = torch.zeros(_PROBE_ROWS, k, dtype=torch.float64)
    inputs[:, first] = torch.randn(_PROBE_ROWS, len(first), generator=generator).double()
    for columns in (first, *others):
        if columns is not first:
            ours = target[:, columns]
            square = torch.linalg.pinv(ours @ ours.T, hermitian=True)
            inputs[:, columns] = -(inputs @ target.T) @ square @ ours
        inputs[:, columns] = inputs[:, columns].to(weight.dtype).double()
    return inputs.to(weight.dtype).to(weight.device)


def _paddings(rows: int) -> list[int]:
    """Row counts worth padding to: at most half as many again, or 64."""
    largest = max(rows + rows // 2, _CANONICAL)
    steps = (2, 4, 8, 16, 32, 60, 64, 128, 256)
    near = {rows + 1, *(-(-rows // s) * s + extra for s in steps for extra in (0, 1))}
    return sorted(n for n in near if rows < n <= largest)
