"""AWQ tensors give the values that they stand for."""

import pytest
import torch
from tests.quant.packers import K, N, awq_config, awq_parts, shapes

from octavo.errors import CheckpointError
from octavo.quant.awq import Awq
from octavo.quant.base import Codes
from octavo.quant.registry import describe


def test_codes() -> None:
    form = describe(awq_config(), "config.json")
    parts, values = awq_parts()
    assert shapes(form.parts((N, K))) == shapes(parts)
    codes = form.decode(parts)
    assert isinstance(codes, Codes)
    assert (codes.group, codes.bits, form.computed_as) == (32, 4, "int4")
    torch.testing.assert_close(codes.values(), values, rtol=1e-5, atol=1e-6)


def test_a_stack_of_matrices_is_stored_as_stacks() -> None:
    found = shapes(Awq(4, 32).parts((5, N, K)))
    assert found == {name: (5, *shape) for name, shape in shapes(awq_parts()[0]).items()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 3}, "bits is 3; it must be 4"),
        ({"version": "gemv"}, "version is 'gemv'; it must be 'gemm'"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": None}, "group_size is None"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        describe(awq_config(**changes), "config.json")


def test_groups_that_no_kernel_computes_on_are_expanded() -> None:
    form = describe(awq_config(group_size=16), "config.json")
    assert form.computed_as == "none"
    assert form.explain() == "awq, 4 bits, expanded: no kernel computes on groups of 16"
