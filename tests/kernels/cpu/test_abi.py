"""The declared layouts of all kernels, and what callers and captured steps rely on."""

import importlib
from itertools import pairwise

import pytest

from octavo.kernels import sampling
from octavo.kernels.cpu import abi
from octavo.kernels.cpu.arguments import Arguments, Kind

DECLARED = {name: one for name, one in vars(abi).items() if isinstance(one, Arguments)}


@pytest.mark.parametrize("name", DECLARED)
def test_each_names_a_kernel_that_exists(name):
    module, _, maker = DECLARED[name].kernel.partition(":")
    assert callable(getattr(importlib.import_module(f"octavo.kernels.cpu.{module}"), maker))


@pytest.mark.parametrize("name", DECLARED)
def test_the_first_field_is_the_counter_that_threads_share(name):
    assert DECLARED[name].names[0] == "counter"
    assert DECLARED[name].kinds[0] is Kind.COUNTER


def test_kernels_have_declarations_of_their_own():
    kernels = [declared.kernel for declared in DECLARED.values()]
    assert len(kernels) == len(set(kernels))


@pytest.mark.parametrize("name", ["RMS_NORM", "ACTIVATION", "ROPE_WRITE", "GEMM_BF16", "GEMM_INT8"])
def test_kernels_of_a_layer_say_where_their_rows_are(name):
    assert len(DECLARED[name].words_of(Kind.ROWS)) == 1


def test_sampling_items_and_statuses_are_those_of_every_device():
    assert abi.SAMPLING_ITEM.dtype == sampling.ITEM
    assert (abi.OK, abi.NOT_FINITE, abi.EMPTY) == (sampling.OK, sampling.NOT_FINITE, sampling.EMPTY)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 256])
@pytest.mark.parametrize("rows", [1, 32, 33, 256])
def test_the_parts_of_scratch_lie_apart_and_are_aligned(rows, head_dim, tiles):
    dim, depth = abi.padded_dim(head_dim), abi.padded_depth(head_dim, tiles)
    assert head_dim <= dim <= depth < head_dim + 32
    layout = abi.scratch_layout(dim, depth, rows, 16, 2)
    tall = -(-rows // abi.QUERY_ROWS) * abi.QUERY_ROWS
    parts = [
        (abi.Q, tall * depth * 2), (layout.o, tall * dim * 4), (layout.stats, tall * 8),
        (layout.new, abi.QUERY_ROWS * dim * 4), (layout.k, abi.SPLIT_KEYS * depth * 2),
        (layout.v, abi.SPLIT_KEYS * dim * 2), (layout.nbytes, 0),
    ]  # fmt: skip
    for (begin, size), (following, _) in pairwise(parts):
        assert begin % 64 == 0
        assert begin + size <= following


def test_the_fixed_parts_of_scratch_lie_apart():
    lanes = 16
    parts = [
        (abi.CONFIG, 64), (abi.SPLIT, abi.ATTENTION_SPLIT.nbytes), (abi.K_AT, abi.SPLIT_KEYS),
        (abi.V_AT, abi.SPLIT_KEYS), (abi.STATS, 8 * abi.QUERY_ROWS),
        (abi.FACTORS, 8 * abi.QUERY_ROWS), (abi.SUMS, 4 * lanes * abi.QUERY_ROWS),
        (abi.S, abi.SCORE_STRIDE * abi.QUERY_ROWS), (abi.K_SCALES, 4 * abi.SPLIT_KEYS),
        (abi.V_SCALES, 4 * abi.SPLIT_KEYS), (abi.Q, 0),
    ]  # fmt: skip
    for (begin, size), (following, _) in pairwise(parts):
        assert begin % 64 == 0
        assert begin + size <= following
