"""The protocol of a device: what is built in has all of it, and what lacks a part is refused."""

import inspect
import sys

import pytest
import torch

from octavo import devices
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kernels.gpu import cards
from octavo.runner.device import OLDEST_GPU, Accelerator, Device, cpu, create_device


def members(of=Device):
    return {name for kind in of.__mro__ for name in vars(kind) if not name.startswith("_")}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(devices, "_registered", {})


@pytest.fixture(params=["cpu", "cuda", "interpret"])
def built_in(request, monkeypatch):
    """The class of a GPU can be made, though not used, without one."""
    if request.param == "cpu":
        return create_device(EngineConfig(device="cpu"))
    from octavo.kernels.gpu import device as gpu

    assert cards.OLDEST == OLDEST_GPU
    monkeypatch.setattr(cards, "check", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(gpu.triton.knobs.runtime, "interpret", True)
    return create_device(EngineConfig(device=request.param))


def test_what_is_built_in_has_every_member_with_the_parameters_of_the_protocol(built_in):
    device = built_in
    kind = Accelerator if isinstance(device, Accelerator) else Device
    for member in members(kind):
        wanted = inspect.getattr_static(kind, member)
        if inspect.isfunction(wanted):
            parameters = list(inspect.signature(wanted).parameters)[1:]
            assert list(inspect.signature(getattr(device, member)).parameters) == parameters, member


def test_what_lacks_a_member_is_refused_by_name():
    complete = create_device(EngineConfig())

    class Part:
        def __init__(self, _):
            for name in members() - {"draw", "memory"}:
                setattr(self, name, getattr(complete, name))

    devices.register("part", Part)
    with pytest.raises(ConfigError, match=r"^device 'part' lacks draw, memory$"):
        create_device(EngineConfig(device="part"))


def test_a_gpu_that_is_not_there_is_refused_with_the_cure(monkeypatch):
    config = EngineConfig(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"a CUDA build of torch.*for CPUs.*leave device out"):
        create_device(config)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"a CUDA build of torch.*for AMD GPUs only"):
        create_device(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"finds no NVIDIA GPU.*serves CUDA 13.0"):
        create_device(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="cuda:2 does not exist; there are cuda:0 to cuda:1"):
        create_device(EngineConfig(device="cuda:2"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ConfigError, match=r"Tesla T4 of compute capability 7.5; 8.0 or newer"):
        create_device(config)


@pytest.mark.parametrize("name", ["cuda", "interpret"])
def test_without_triton_it_is_named_with_the_cure(name, monkeypatch):
    """After what a CUDA build of torch would cure, which brings Triton."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "octavo.kernels.gpu.device", raising=False)
    if name == "cuda":
        monkeypatch.setattr(torch.version, "cuda", None)
        with pytest.raises(ConfigError, match="is built for CPUs only"):
            create_device(EngineConfig(device=name))
        monkeypatch.setattr(cards, "check", lambda device: None)
    with pytest.raises(ConfigError, match=f"device '{name}'.*package triton.*CUDA build.*leave"):
        create_device(EngineConfig(device=name))


def test_fp8_kv_is_refused_where_it_cannot_be_converted(monkeypatch):
    config = EngineConfig(device="cuda", kv_cache_dtype="fp8")
    monkeypatch.setattr(cards, "check", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"8.9 or newer.*NVIDIA A100 has 8.0; use kv_cache_dt"):
        create_device(config)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert create_device(config).name == "cuda"


@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_is_set_by_its_number(monkeypatch, name, index):
    """torch.cuda.set_device refuses a device without one."""
    chosen = []
    monkeypatch.setattr(cards, "check", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    device = create_device(EngineConfig(device=name))
    assert [one.index for one in chosen] == [index]
    assert device.name == name


def test_gpus_are_accelerators(built_in):
    assert isinstance(built_in, Accelerator) == (built_in.name != "cpu")


def test_auto_is_a_gpu_that_has_kernels_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert create_device(EngineConfig()).name == "cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(devices._BUILT_IN, "cuda", "tests.runner.test_device:stand_in")
    assert create_device(EngineConfig()).name == "stand-in"


def stand_in(config):
    device = cpu(config)
    device.name = "stand-in"
    return device


def test_the_interpreter_must_be_asked_for():
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        create_device(EngineConfig(device="interpret"))


def test_sizes_of_graphs_are_refused_where_there_is_no_ladder():
    with pytest.raises(ConfigError, match=r"cuda_graph_sizes is for GPUs.*leave it out"):
        create_device(EngineConfig(device="cpu", cuda_graph_sizes="1,2"))
