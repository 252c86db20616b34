"""`octavo plan`: the table, JSON, and wrong command lines."""

import json
import subprocess
import sys

import pytest

from octavo.cli.main import command_parser, main
from octavo.cli.plan import _HERE
from octavo.planner.target import HERE


@pytest.fixture(autouse=True)
def _log(monkeypatch):
    monkeypatch.setattr("octavo.cli.plan.configure", lambda level: None)


def test_the_table_says_what_fits(capsys):
    assert main(["plan", "llama-2-13b", "--device", "A100-40GB", "--lengths", "1000,200"]) == 0
    text = capsys.readouterr().out
    assert "llama-2-13b: LlamaForCausalLM, 13.02 billion parameters, bfloat16\non a100-40gb" in text
    assert "in all, at least                      24.24 GiB  (26,031,728,640 bytes)" in text
    assert "40 layers, all tokens                 819,200 bytes a token" in text
    assert "  1,000 + 200 tokens " in text
    assert "--tensor-parallel-size 2 " in text
    assert "start it with: octavo serve MODEL --max-num-seqs " in text
    assert all(len(line) < 90 for line in text.splitlines())


def test_windows_and_ranks_in_the_table(capsys):
    flags = ["--device", "h200", "-tp", "2", "--kv-cache-dtype", "int8"]
    assert main(["plan", "gemma-3-27b", *flags]) == 0
    text = capsys.readouterr().out
    assert "on h200, on each of 2" in text
    assert "4 x 11 layers, the last 1,024 tokens" in text
    assert "bytes a token, behind the windows" in text
    assert "KV cache of each rank, int8" in text


def test_json_has_every_field(capsys):
    flags = ["--device", "described", "--memory", "24GiB", "--kv-cache-memory-bytes", "4G"]
    assert main(["plan", "llama-3.1-8b", "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_bytes"] == 2048 * 2**21  # 16 tokens of 131,072 bytes
    assert found["is_exact"] is True
    assert found["groups"] == [{"window": None, "layers": 32, "bytes_per_token": 131072}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "a100-40g"], "unknown card 'a100-40g'; did you mean 'a100-40gb'?"),
        (["--memory", "0"], "memory is '0'; a device has some, such as 40GiB"),
        (["--memory", "40GB"], "memory must be a number such as"),
        (["--lengths", "1000"], "'1000' must be tokens of a prompt and of its answer"),
        (["--lengths", "0,10"], "'0,10' must be tokens"),
        (["--lengths", "9" * 5000 + ",10"], "must be tokens"),
        (["--devise", "l4"], "unknown flag '--devise'; did you mean '--device'?"),
    ],
)
def test_wrong_command_lines_end_with_2(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", "llama-2-13b", *words])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lama-2-13b", "--device", "l4"], "no such file or folder, and no model of that name"),
        (["llama-3.1-70b", "--device", "l4"], "does not fit on l4"),
        (["llama-2-7b", "--device", "described"], "a described device needs --memory"),
        (["llama-2-7b", "--memory", "1"], "does not fit on cpu with the memory given"),
    ],
)
def test_what_cannot_be_planned_ends_with_1(words, message, capsys):
    assert main(["plan", *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_parser_needs_no_torch_and_knows_this_machine_s_devices():
    code = ("import sys; from octavo.cli.main import command_parser; command_parser('plan');"
            "assert 'torch' not in sys.modules and 'numpy' not in sys.modules")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)
    assert _HERE == HERE
    assert command_parser("plan").parse([]).device == "auto"
