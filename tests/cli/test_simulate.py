"""`octavo simulate`: the table, JSON, sweeps, charts, and wrong command lines."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from octavo.bench import report
from octavo.cli import simulate
from octavo.cli.main import main
from octavo.sim import workload

BASE = ["simulate", "llama-3.1-8b", "--device", "a100-40gb"]
SMALL = ["--num-prompts", "20", "--input-len", "100", "--output-len", "20", "--request-rate", "9"]


@pytest.fixture(autouse=True)
def _log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.simulate.configure", lambda level: None)


def test_the_table_and_static_batching(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, *SMALL, "--static"]) == 0
    text = capsys.readouterr().out
    assert " Simulated Result " in text
    assert " Static Batching " in text
    assert text.count("Completed requests:                      20") == 2


def test_json_is_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for seed in ("0", "0", "1"):
        assert main([*BASE, *SMALL, "--seed", seed, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] != found[2]
    assert found[0]["completed"] == 20
    assert {"mean_ttft_ms", "median_itl_ms", "p99_e2el_ms", "p90_tpot_ms"} <= found[0].keys()


def test_a_sweep_of_a_flag_of_the_engine_and_its_chart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    chart = tmp_path / "chart.svg"
    flags = ["--sweep", "max-num-seqs=1,8", "--chart", str(chart), "--static", "--json"]
    assert main([*BASE, *SMALL, *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sweep"] == "max_num_seqs"
    one, eight = found["runs"]
    assert (one["value"], eight["value"]) == ("1", "8")
    assert one["max_concurrent_requests"] == 1 < eight["max_concurrent_requests"]
    assert one["static"]["completed"] == 20
    ElementTree.fromstring(chart.read_text())


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("request_rate=1,100", ["1", "100"]),
        ("scheduler=fifo; slo,p99_itl_ms=50", ["fifo", "slo,p99_itl_ms=50"]),
        ("enable_prefix_caching=true,false", ["true", "false"]),
        ("model=llama-3.1-8b,llama-3.2-1b", ["llama-3.1-8b", "llama-3.2-1b"]),
        ("memory=38GiB,40GiB", ["38GiB", "40GiB"]),
    ],
)
def test_other_sweeps(sweep: str, values: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, *SMALL, "--sweep", sweep]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == values
    assert (lines[1].split()[1:] != lines[2].split()[1:]) == sweep.startswith(
        ("req", "sch", "model")
    )


def test_a_trace_and_a_named_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival,prompt_tokens,output_tokens\n0,50,5\n1,60,6\n")
    for source, tokens in ((str(path), 11), ("W3", 2048)):
        assert main([*BASE, "--workload", source, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["total_output_tokens"] == tokens


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "W5"], "unknown workload 'W5'"),
        (["--workload", "none.csv"], "the trace none.csv cannot be read"),
        (["--workload", "W1", "--input-len", "5"], "--input-len is for random workloads; W1 says"),
        (["--workload", "t.csv", "--seed", "1"], "--seed is not for a trace"),
        (["--num-prompts", "0"], "num_prompts must be at least 1, not 0"),
        (["--request-rate", "0"], "request_rate must be above 0"),
        (["--max-concurrency", "0"], "max_concurrency must be at least 1, not 0"),
        (["--bandwidth", "0"], "bandwidth must be above 0, and at most 1e+09, not 0.0"),
        (["--flops", "1e300"], "flops must be above 0, and at most 1e+09, not 1e+300"),
        (["--workload", ""], "unknown workload ''"),
        (["--seed=-1"], "seed must be at least 0, not -1"),
        (["--input-len", str(10**30)], "input_len must be at most 2147483648, not 1e+30"),
        (["--num-prompts", str(10**12)], "num_prompts must be at most 100000000, not 1e+12"),
        (["--request-rate", "1e-300"], "request_rate is 1e-300, so that the last request comes"),
        (["--burstiness", "2"], "burstiness is of arrivals over time: give request_rate, too"),
        (["--memory", "1000000TiB"], "and at most 67108864 can be simulated; give less"),
        (["--trace", "t.json"], "trace is written by an engine that runs; leave it out"),
        (["--sweep", "seed=1,2", "--chart", "/"], "--chart / is a folder; name a file"),
        (["--sweep", "max_num_seqs=" + ",".join("1" * 99)], "has 99 values: give 2 to 64 values"),
        (["--input-len", "200000"], "no request fits: the shortest has 200000 + 128 tokens"),
        (["--sweep", "max_num_seq=1,2"], "'max_num_seq' is no flag that a sweep can change; did"),
        (["--sweep", "max_num_seqs=1"], "give 2 to 64 values, such as max_num_seqs=64,128,256"),
        (["--sweep", "seeds"], "'seeds' is no flag that a sweep can change"),
        (["--chart", "c.svg"], "--chart shows a sweep: add --sweep"),
        (["--sweep", "seed=1,2", "--chart", "no/c.svg"], "--chart no/c.svg: there is no folder no"),
        (["--metric-percentiles", "101"], "metric-percentiles must be such as 50,90,99"),
        (["--scheduler", "lifo"], "unknown scheduler 'lifo'"),
        (["--device", "described"], "a described device needs --memory"),
    ],
)  # fmt: skip
def test_one_sentence_for_what_is_wrong(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_chart_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--sweep", "max-num-seqs=1,8", "--chart", "/dev/full"]
    assert main([*BASE, *SMALL, *flags]) == 1
    assert "--chart /dev/full cannot be written: No space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "a100-40g"], "unknown card 'a100-40g'; did you mean 'a100-40gb'?"),
        (["--sweep", "max_num_seqs=1,x"], "argument --max-num-seqs: invalid int value: 'x'"),
        (["--length-distribution", "normal"], "invalid choice: 'normal'"),
        (["--work-load", "W1"], "unknown flag '--work-load'; did you mean '--workload'?"),
    ],
)
def test_wrong_command_lines(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*BASE, *words])
    assert message in capsys.readouterr().err


def test_a_model_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "no-such-model", "--device", "h200"]) == 1
    assert "no-such-model" in capsys.readouterr().err


def test_its_parser_knows_what_the_modules_know() -> None:
    assert tuple(workload.NAMED) == simulate.NAMED
    assert simulate.DISTRIBUTIONS == workload.DISTRIBUTIONS
    assert tuple(simulate.METRICS.split(",")) == tuple(report.METRICS)
    code = ("import sys; from octavo.cli.main import command_parser; "
            "command_parser('simulate').format_help(); "
            "assert 'torch' not in sys.modules and 'numpy' not in sys.modules")  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)
