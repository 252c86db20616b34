"""Which group the ranks of an engine form: by their device, and by whether they share a machine."""

from octavo.dist.base import SINGLE, Group
from octavo.dist.rendezvous import Rendezvous


def create_group(meeting: Rendezvous, rank: int, size: int, device: str) -> Group:
    """The group of `size` ranks that meet at `meeting`; device: this rank's, as torch knows it.

    Waits until all have come. Raises ConfigError or EngineError.
    """
    if size == 1:
        return SINGLE
    # Imported late: with one rank, torch.distributed is not needed.
    if device.startswith("cuda"):
        from octavo.dist.nccl import nccl_group

        return nccl_group(meeting, rank, size, device)
    from octavo.dist.gloo import gloo_group

    return gloo_group(meeting, rank, size)
