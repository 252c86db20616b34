"""A group of ranks over NCCL: one GPU each, on one machine or several.

Operations are put on the current stream, like kernels, and are not waited for; a step of captured
operations replays them. A rank whose peer has ended waits on the device: the executor, which sees
processes end, calls `abort` then.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from octavo.dist.base import Group
from octavo.dist.rendezvous import Rendezvous, open_store
from octavo.dist.torch_group import TorchGroup
from octavo.errors import ConfigError, EngineError, brief

# The executor's watch tells which rank hangs; NCCL's own would end this process without a reason.
_LIMIT = timedelta(hours=24)


class NcclGroup(TorchGroup):
    """See `octavo.dist.base.Group`."""

    def abort(self) -> None:
        super().abort()
        if (backend := self._backend) is not None:
            backend.abort()  # ends the kernels that wait on the device

    def close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None and not self._aborted.is_set():
            backend.shutdown()


def nccl_group(meeting: Rendezvous, rank: int, size: int, device: str) -> Group:
    """The group of the processes that meet at `meeting`; device: this rank's, such as "cuda:1".

    Waits for all of them. Raises ConfigError where torch has no NCCL, EngineError if a rank does
    not come.
    """
    if not dist.is_nccl_available():
        raise ConfigError(
            "tensor_parallel_size above 1 on GPUs needs NCCL, which this build of torch lacks; "
            "install torch's CUDA build for Linux"
        )
    torch.cuda.set_device(device)
    store = open_store(meeting, rank, size)
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = _LIMIT
    try:
        backend: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        backend.eager_connect_single_device(torch.device(device))
    except RuntimeError as error:
        raise EngineError(
            f"rank {rank} of {size} cannot meet the others: {brief(error)}"
        ) from error
    return NcclGroup(backend, rank, size, "NCCL", device)
