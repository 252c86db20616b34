"""The settings that /metrics shows."""

from octavo.config import EngineConfig
from octavo.server.config_info import config_labels


def test_settings_as_text(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    config = EngineConfig(model="/models/secret", max_num_seqs=5, scheduler="mine.policy:Own,x=1")
    found = config_labels(config)
    assert found["max_num_seqs"] == "5"
    assert found["max_waiting"] == str(4 * 5 + 1024)
    assert (found["quantization"], found["enable_prefix_caching"]) == ("", "True")
    assert (found["scheduler"], found["threads"]) == ("custom", "3")
    assert int(found["processors"]) >= 1
    assert not any("secret" in value or "policy" in value for value in found.values())


def test_a_flag_wins_over_the_variable(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert config_labels(EngineConfig(model="m", threads=7))["threads"] == "7"


def test_they_are_on_the_page(server):
    assert server.metric("octavo:config_info", max_num_seqs="64", swap_space="0") == 1
