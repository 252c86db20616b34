"""The CPU as a device with memory of its own, which is exhausted on demand."""

import torch

from octavo.kernels.cpu.device import CpuDevice
from octavo.kernels.gpu import memory


class FakeAccelerator(CpuDevice):
    """An `octavo.runner.device.Accelerator`. most: tokens of a step that fit in its memory."""

    name = "accelerator"
    shares_host_memory = False
    warm_up_sizes = (1, 5)
    runs_ahead = True
    pinned = 0

    def __init__(self, config):
        super().__init__(config)
        self.calls = []
        self.most = 2**31

    def tensor(self, name, array):
        if name == "token_ids":
            self.calls.append(len(array))
            if len(array) > self.most:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().tensor(name, array.copy())

    def copy_blocks(self, blocks, sources, targets):
        self.calls.append(list(blocks))
        memory.copy_blocks(blocks, sources, targets)

    def make_current(self):
        """There is one."""

    def synchronize(self):
        self.calls.append("synchronize")

    def release(self):
        self.calls.append("release")
        super().release()

    def is_out_of_memory(self, error):
        return memory.is_out_of_memory(error)
