"""A recording's memory: aligned, of one tensor at a time, and used again when that is freed."""

import torch

from octavo.kernels.cpu.pool import Pool


def test_tensors_that_live_at_once_do_not_overlap():
    pool = Pool()
    tensors = [pool.empty((size,), torch.float32) for size in (1, 100, 17, 64)]
    for value, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(value)
    assert [set(tensor.tolist()) for tensor in tensors] == [{0.0}, {1.0}, {2.0}, {3.0}]


def test_memory_returns_with_the_last_view():
    pool = Pool()
    first = pool.empty((4, 8), torch.bfloat16)
    address, view = first.data_ptr(), first[2:]
    del first
    assert pool.empty((4, 8), torch.bfloat16).data_ptr() != address
    del view
    again = [pool.empty((4, 8), torch.bfloat16) for _ in range(2)]
    assert address in [tensor.data_ptr() for tensor in again]
    assert pool.num_bytes == 2 * 64


def test_the_smallest_block_that_fits_is_taken():
    pool = Pool()
    large, small = pool.empty((1000,), torch.uint8), pool.empty((100,), torch.uint8)
    small_address = small.data_ptr()
    del large, small
    assert pool.empty((90,), torch.uint8).data_ptr() == small_address
    assert pool.num_bytes == 1024 + 128
