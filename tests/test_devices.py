"""Names of devices: built in, registered, unknown."""

import pytest

from octavo import devices
from octavo.cli.arguments import Parser
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.utils.flags import add_flags


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(devices, "_registered", {})


def test_auto_is_the_first_built_in_one():
    assert devices.names() == ("auto", "cpu", "cuda", "interpret")
    assert devices.create("auto", EngineConfig()).name == "cpu"


def test_a_registered_name_is_accepted_wherever_a_device_is_named():
    with pytest.raises(
        ConfigError, match=r"device must be one of \('auto', 'cpu', .*\), not 'mine'"
    ):
        EngineConfig(device="mine")
    devices.register("mine", lambda config: config.block_size)
    assert devices.create("mine", EngineConfig(device="mine", block_size=32)) == 32
    parser = Parser()
    add_flags(parser, EngineConfig)
    assert parser.parse(["--device", "mine"]).device == "mine"


def test_an_unknown_name_lists_the_known_ones():
    known = "known: auto, cpu, cuda, interpret; did you mean"
    with pytest.raises(ConfigError, match=f"unknown device 'cpv'; {known}"):
        devices.create("cpv", EngineConfig())


@pytest.mark.parametrize("name", ["", "auto", "cpu"])
def test_a_taken_name_is_refused(name):
    with pytest.raises(ConfigError, match="taken or empty"):
        devices.register(name, lambda config: None)
