"""The declared layouts of all kernels, and what callers and captured steps rely on."""

import importlib

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
