"""The accuracy benchmark: nothing lost is nothing reported, and what is lost shows."""

import json
import sys

import pytest

import kit
from benchmarks import accuracy


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    model = str(kit.tiny(tmp_path / "model"))
    monkeypatch.setattr(accuracy, "TEXT", accuracy.TEXT[:1500])

    def measured(*words):
        monkeypatch.setattr(sys, "argv", ["accuracy", "--model", model, *words])
        assert accuracy.main() == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return measured


def test_the_reference_against_itself_loses_nothing(run):
    values = run("--dtype", "float32")
    assert values["tokens"] > 1400  # a token is a byte
    assert values["perplexity"] == values["reference_perplexity"] > 2
    assert values["kl_mean"] == values["kl_p99"] == 0
    assert values["same_top_token"] == values["answer_tokens_same"] == 1
    assert values["answers_same"] == values["answers"] == 16


def test_rounding_shows(run):
    values = run("--dtype", "bfloat16", "--kv", "float32")
    assert 0 < values["kl_mean"] < 0.1 < values["same_top_token"] < 1.0001
