"""Which group the ranks of an engine form: by their device, and by whether they share a machine."""

from octavo.dist.base import SINGLE, Group
from octavo.dist.rendezvous import Rendezvous


def create_group(meeting: Rendezvous, rank: int, size: int, device: str) -> Group:
    """The group of `size` ranks that meet at `meeting`; device: this rank's, as torch knows it.

    On CPUs they share memory if they are on one machine, and communicate over gloo otherwise.

    Waits until all have come. Raises ConfigError or EngineError.
    """
    if size == 1:
        return SINGLE
    # Imported late: with one rank, torch.distributed is not needed.
    if device.startswith("cuda"):
        from octavo.dist.nccl import nccl_group

        return nccl_group(meeting, rank, size, device)
    if meeting.file:
        from octavo.dist.shared_memory import is_available, shared_memory_group

        if is_available() and (group := shared_memory_group(meeting, rank, size)):
            return group
    from octavo.dist.gloo import gloo_group

    return gloo_group(meeting, rank, size)
