"""The sum that every group gives."""

import pytest
import torch

from octavo.dist.base import SINGLE, Group, sum_in_rank_order


def test_sums_are_in_rank_order() -> None:
    big, one = torch.full((3,), 2.0**24), torch.ones(3)
    assert torch.equal(sum_in_rank_order([big, one, -big]), torch.zeros(3))  # 1 is lost in big + 1
    assert torch.equal(sum_in_rank_order([big, -big, one]), one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    parts = [torch.tensor([value], dtype=dtype) for value in (1.0, 2.0**-12, 2.0**-12, -1.0)]
    total = sum_in_rank_order(parts)
    assert total.dtype == dtype
    assert total.item() == 2.0**-11  # 0 if each sum were rounded


def test_parts_are_not_changed() -> None:
    parts = [torch.ones(2), torch.ones(2)]
    sum_in_rank_order(parts)
    assert torch.equal(parts[0], torch.ones(2))


def test_a_single_rank_gives_its_own_values() -> None:
    group: Group = SINGLE
    x = torch.arange(6.0).reshape(2, 3)
    assert all(call(x) is x for call in (group.all_reduce, group.all_gather, group.broadcast))
    assert (group.rank, group.size, group.min(7)) == (0, 1, 7)
    group.close()
