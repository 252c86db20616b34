"""The protocol of a device: what is built in has all of it, and what lacks a part is refused."""

import inspect

import pytest

from octavo import devices
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.runner.device import Device, create_device


def members():
    return {name for kind in Device.__mro__ for name in vars(kind) if not name.startswith("_")}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(devices, "_registered", {})


@pytest.mark.parametrize("name", devices.names())
def test_what_is_built_in_has_every_member_with_the_parameters_of_the_protocol(name):
    device = create_device(EngineConfig(device=name))
    for member in members():
        wanted = inspect.getattr_static(Device, member)
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
