"""Inputs and results of steps: what is copied, when memory is used again, how it is aligned."""

import numpy as np
import pytest
import torch
from tests.runner.asynchronous import LateCopies

from octavo.kernels.gpu.staging import HostCopies, Staging


@pytest.fixture
def copies() -> LateCopies:
    return LateCopies()


@pytest.fixture
def staging(copies: LateCopies) -> Staging:
    return Staging(copies)


def test_arrays_of_any_type_arrive_in_one_copy_aligned_alike(
    staging: Staging, copies: LateCopies
) -> None:
    arrays = [
        np.arange(5), np.zeros(0, np.int64), np.arange(6, dtype=np.int32).reshape(2, 3)[:, :2],
        np.array([True, False]), np.array([0.5]), np.array([1.5], np.float32),
    ]  # fmt: skip
    sent = staging.send("inputs", arrays)
    assert copies.issued == 1
    for tensor, array in zip(sent, arrays, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert not array.size or (tensor.data_ptr() - sent[0].data_ptr()) % 256 == 0


def test_an_input_has_one_place_on_the_device_and_a_buffer_for_each_copy_in_flight(
    staging: Staging, copies: LateCopies
) -> None:
    (first,) = staging.send("ids", [np.arange(3)])
    (second,) = staging.send("ids", [np.arange(4)])
    assert first.data_ptr() == second.data_ptr()
    assert copies.most == 2
    copies.complete(1)
    for number in range(2, 20):
        staging.send("ids", [np.arange(3)])
        copies.complete(number)
    assert copies.most == 2
    assert len(staging._inputs["ids"]) == 2


def test_what_the_caller_does_to_an_array_later_changes_nothing(
    staging: Staging, copies: LateCopies
) -> None:
    array = np.arange(3)
    (tensor,) = staging.send("ids", [array])
    array[:] = 9
    assert torch.equal(tensor, torch.arange(3))
    copies.complete(1)


def test_an_array_may_fill_memory_of_the_caller(staging: Staging) -> None:
    target = torch.zeros(8, dtype=torch.int32)
    staging.fill("lists", np.arange(3, dtype=np.int32), target[2:5])
    assert target.tolist() == [0, 0, 0, 1, 2, 0, 0, 0]


def test_longer_arrays_get_more_memory(staging: Staging) -> None:
    staging.send("ids", [np.arange(3)])
    (tensor,) = staging.send("ids", [np.arange(10_000)])
    assert torch.equal(tensor, torch.arange(10_000))


def test_results_may_be_read_late_in_any_order_and_again(
    staging: Staging, copies: LateCopies
) -> None:
    readings = [staging.fetch(torch.full((2, 2), n)) for n in range(4)]
    for n in (2, 0, 3, 1):
        assert readings[n]().tolist() == [[n, n], [n, n]]
        assert readings[n]().tolist() == [[n, n], [n, n]]
    assert len(staging._results) == 4
    later = staging.fetch(torch.full((1,), 7))
    assert len(staging._results) == 4
    assert later().tolist() == [7]


def test_memory_of_a_result_that_nobody_reads_is_used_again_when_its_copy_is_done(
    staging: Staging, copies: LateCopies
) -> None:
    staging.fetch(torch.arange(2))
    read = staging.fetch(torch.arange(3))
    assert len(staging._results) == 2
    assert read().tolist() == [0, 1, 2]  # by then the first copy is done too
    assert staging.fetch(torch.arange(4))().tolist() == [0, 1, 2, 3]
    assert len(staging._results) == 2


def test_without_a_device_beside_the_host_one_buffer_is_enough() -> None:
    staging = Staging(HostCopies())
    for n in range(5):
        (tensor,) = staging.send("ids", [np.arange(n + 1)])
        assert staging.fetch(tensor.clone())().tolist() == list(range(n + 1))
    assert (len(staging._inputs["ids"]), len(staging._results)) == (1, 1)
