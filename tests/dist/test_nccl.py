"""What of the NCCL path can be tried without a GPU."""

from pathlib import Path

import pytest
import torch.distributed as dist

from octavo.dist.create import create_group
from octavo.dist.rendezvous import Rendezvous
from octavo.errors import ConfigError


@pytest.mark.skipif(dist.is_nccl_available(), reason="torch has NCCL")
def test_a_build_without_nccl_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs NCCL, which this build of torch lacks"):
        create_group(Rendezvous(file=str(tmp_path / "store")), 0, 2, "cuda:0")
