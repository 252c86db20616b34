"""The check of a GPU, without one: its shapes, its rows, its limit; all sections in a dry run."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import __main__ as check
from benchmarks.gpu import batching, speed
from benchmarks.gpu.models import (
    AHEAD,
    SHAPES,
    HostRandomWeights,
    RandomWeights,
    compile_ahead,
    start,
    write,
)
from benchmarks.gpu.section import Rows, Scale, distance

from octavo.checkpoint.safetensors import SAFETENSORS

ROOT = Path(__file__).parents[2]


def test_shapes_are_those_of_the_models() -> None:
    embedding = {name: shape.vocab * shape.hidden for name, shape in SHAPES.items()}
    read = {name: SHAPES[name].parameters_read for name in SHAPES}
    assert (read["8B"] + embedding["8B"]) / 1e9 == pytest.approx(8.03, abs=0.01)
    assert read["1B"] / 1e9 == pytest.approx(1.236, abs=0.001)
    assert (read["13B"] + embedding["13B"]) / 1e9 == pytest.approx(13.02, abs=0.01)
    assert SHAPES["8B"].kv_bytes() == 131072


def test_a_checkpoint_is_a_hole_of_the_full_size(tmp_path: Path) -> None:
    folder = write(tmp_path / "8B", SHAPES["8B"])
    file = folder / "model.safetensors"
    assert file.stat().st_size > 16e9
    assert file.stat().st_blocks * 512 < 2**20
    assert SAFETENSORS.open(file).tensors.keys() == SHAPES["8B"].tensors().keys()


def test_weights_are_the_same_each_time(tmp_path: Path) -> None:
    scale = Scale(dry=True, until=0)
    folder = write(tmp_path, SHAPES["toy"])
    options = {"device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 8}
    one, other = (start(folder, scale, True, **options) for _ in range(2))
    ids = torch.arange(9)
    assert torch.equal(one.model.embed(ids), other.model.embed(ids))
    assert float(one.model.embed(ids).std()) == pytest.approx(1, abs=0.1)
    assert issubclass(HostRandomWeights, RandomWeights)


def test_static_and_continuous_batching_do_the_same_work(tmp_path: Path) -> None:
    runner = start(
        write(tmp_path, SHAPES["toy"]), Scale(dry=True, until=0), True, device="cpu",
        max_model_len=64, num_gpu_blocks_override=9, max_num_batched_tokens=64, swap_space=0,
        enable_prefix_caching=False,
    )  # fmt: skip
    jobs = [batching.Job(prompt, output) for prompt, output in ((20, 6), (3, 2), (30, 4))]
    static, paged = batching._static(runner, jobs), batching._continuous(runner, jobs)
    assert (static.concurrency, paged.concurrency) == (2, 3)  # of the same pool
    for found in (static, paged):
        assert len(found.latencies) == 3
        assert max(found.latencies) <= found.seconds
        assert 0 < found.used <= 1
    assert paged.used > static.used


def test_what_is_compiled_ahead_is_started(tmp_path: Path) -> None:
    assert len(AHEAD) == check._AHEAD
    cpu = [n for n, (_, options) in enumerate(AHEAD) if options.get("device") == "cpu"]
    compile_ahead(tmp_path, Scale(dry=True, until=0), cpu[0])
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 1


def test_the_card_s_own_rates_are_a_row(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl", "speed")
    bandwidth, rate = speed._card(Scale(dry=True, until=0), rows)
    made = json.loads((tmp_path / "rows.jsonl").read_text())
    assert (made["copy_bytes_per_s"], made["bf16_operations_per_s"]) == (bandwidth, rate)


def test_rows_are_on_the_disk_at_once(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl", "kernels")
    rows.add(case="a", ok=True)
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == {
        "section": "kernels", "case": "a", "ok": True,
    }  # fmt: skip


def test_a_distance_sees_what_is_not_a_number() -> None:
    ones = torch.ones(4)
    assert distance(ones * 1.01, ones) == pytest.approx(0.01, rel=1e-3)
    assert not distance(ones * torch.nan, ones) <= 1


def test_a_section_that_fails_or_has_no_time_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def started(name: str, *_: object) -> "list[subprocess.Popen[str]]":
        asked.append(name)
        code = "import sys; sys.exit('broken')" if name == "kernels" else "pass"
        return [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)]

    monkeypatch.setattr(check, "_started", started)
    assert check._all(["kernels", "tokens"], tmp_path, 60, dry=True) == 1
    assert check._all(["graphs"], tmp_path, 1, dry=True) == 1
    assert asked == ["kernels", "tokens"]
    lines = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    assert [line["result"] for line in lines] == [
        "failed (1): broken", "ok", "not begun: out of time",
    ]  # fmt: skip


def test_a_process_that_hangs_is_ended() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], stderr=subprocess.PIPE, text=True
    )
    assert check._ended([process], time.monotonic()) == "ended: it took too long"
    assert process.returncode is not None


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_sections_run_dry(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", str(tmp_path),
         "--limit", "1150"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "gpu_check.jsonl").read_text().splitlines()]
    assert {line["section"] for line in lines} == set(check.SECTIONS)
    assert all(line.get("ok", True) for line in lines)
    assert {"gain", "not_hidden_ms", "share_of_limit", "throughput_ratio"} <= {
        key for line in lines for key in line
    }
