"""Weights reach a device through two buffers, each used again only when its copy is done."""

from pathlib import Path

import pytest
import torch

import kit
from models import toys
from octavo.config import EngineConfig
from octavo.kernels.gpu.device import InterpretDevice
from octavo.kernels.gpu.staging import HostCopies
from octavo.kernels.gpu.uploads import Uploads
from octavo.models.loader import load_model


class Late(HostCopies):
    """Copies that are made when they are waited for, or at the end: what a buffer holds then."""

    def __init__(self) -> None:
        self.sent: list[LateEvent] = []
        self.sizes: list[int] = []

    def host(self, size: int) -> torch.Tensor:
        self.sizes.append(size)
        return super().host(size)

    def send(self, host: torch.Tensor, target: torch.Tensor) -> "LateEvent":
        self.sent.append(LateEvent(host, target))
        return self.sent[-1]

    def finish(self) -> None:
        for event in self.sent:
            event.synchronize()


class LateEvent:
    def __init__(self, host: torch.Tensor, target: torch.Tensor) -> None:
        self._copy: tuple[torch.Tensor, torch.Tensor] | None = (host, target)

    def query(self) -> bool:
        return self._copy is None

    def synchronize(self) -> None:
        if self._copy is not None:
            host, target = self._copy
            target.copy_(host)
            self._copy = None


def fill(uploads: Uploads, weight: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(weight)

    def read(begin: int, end: int, host: torch.Tensor) -> None:
        host.copy_(weight[begin:end])

    uploads(out, read)
    return out


def test_a_buffer_is_used_again_when_its_copy_is_done() -> None:
    copies = Late()
    uploads = Uploads(copies, piece=100)
    weights = [torch.randn(23, 6), torch.randn(7).half(), torch.randn(3, 5, 9)]
    found = [fill(uploads, weight) for weight in weights]
    assert sum(not event.query() for event in copies.sent) == 2
    copies.finish()
    for got, weight in zip(found, weights, strict=True):
        assert torch.equal(got, weight)


def test_host_memory_is_two_pieces_or_two_rows() -> None:
    copies = Late()
    fill(Uploads(copies, piece=100), torch.randn(400, 5))
    assert copies.sizes == [100, 100]
    fill(Uploads(copies, piece=100), torch.randn(4, 50))
    assert copies.sizes[2:] == [200, 200]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "Q4_0"])
def test_every_weight_arrives(kind: str, tmp_path: Path) -> None:
    """Joined, permuted and in blocks: a model has the CPU's logits."""
    if kind == "safetensors":
        folder = kit.tiny(tmp_path)
    else:
        folder = toys.blocks_of(kind, tmp_path / "m.gguf")[1]
    config = EngineConfig(
        model=str(folder), device="interpret", load_progress=False, attention_impl="torch"
    )
    found = []
    for model in (toys.load(folder), load_model(config, InterpretDevice(config), torch.float32)):
        found.append(toys.Paged(model).step([("a", [i % 100 for i in toys.prompt(9)])])[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
