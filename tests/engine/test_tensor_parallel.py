"""A model that several processes compute: the same tokens as one, and one end for all of them.

A worker imports torch, which takes seconds: what needs many of them is slow.
"""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import rank_faults
import serving
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.core.policy_registry import policy_names
from octavo.dist.rendezvous import Rendezvous, free_port
from octavo.engine.client import EXECUTOR
from octavo.engine.executor import create_executor
from octavo.engine.tensor_parallel import TensorParallelExecutor
from octavo.engine.worker_launcher import AnySocket, LocalWorkers
from octavo.engine.workers import Limits, Workers
from octavo.errors import ConfigError, EngineDeadError
from octavo.text.tokenizer import load_tokenizer

SLO = "slo,p99_ttft_ms=10000"
PARAMS = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 11, "n": 3},
    {"temperature": 1.3, "seed": 12, "top_k": 40, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.7, "seed": -4, "min_p": 0.02, "prompt_logprobs": 1},
    {"temperature": 0.9, "seed": 5, "structured_outputs": {"regex": "[a-z]{3,40}"}},
]
LENGTHS = [1, 2, 15, 16, 17, 33, 40, 47, 64, 70]


def options(**changes: Any) -> dict[str, Any]:
    return {
        "dtype": "float32", "num_gpu_blocks_override": 300, "max_model_len": 120,
        "load_progress": False, "device": "cpu", **changes,
    }  # fmt: skip


# Little room and small steps: prompts are computed in chunks, requests are preempted and swapped.
TIGHT = {
    "num_gpu_blocks_override": 10, "max_num_batched_tokens": 32, "preemption_mode": "swap",
}  # fmt: skip


def ask(llm: LLM, lengths: list[int] = LENGTHS) -> list[Any]:
    prompts = [[(7 * i + length) % 256 for i in range(length)] for length in lengths]
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True, logprobs=2, **PARAMS[i % len(PARAMS)])
        for i in range(len(lengths))
    ]
    return llm.generate(prompts, params, use_tqdm=False)


def check_same(got: list[Any], wanted: list[Any]) -> None:
    """The same tokens; log-probabilities as near as other sums leave them, with equal ranks."""
    for one, other in zip(got, wanted, strict=True):
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        for choice, same in zip(one.outputs, other.outputs, strict=True):
            for have, want in zip(choice.logprobs, same.logprobs, strict=True):
                assert {t: e.rank for t, e in have.items()} == {t: e.rank for t, e in want.items()}
                for token, entry in want.items():
                    assert have[token].logprob == pytest.approx(entry.logprob, abs=1e-3)
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


def workers_of(llm: LLM) -> dict[int, int]:
    """The process of each rank above 0."""
    workers = llm.engine.executor._workers._workers  # type: ignore[attr-defined]
    return {rank: worker.process._process.pid for rank, worker in workers.items()}


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def wanted(tiny_folder: Path) -> Iterator[LLM]:
    """One rank."""
    with LLM(str(tiny_folder), **options()) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(tiny_folder: Path) -> Iterator[LLM]:
    """Two ranks with little room."""
    with LLM(str(tiny_folder), tensor_parallel_size=2, **options(**TIGHT)) as llm:
        yield llm


@pytest.fixture
def faulty(tiny_folder: Path) -> Iterator[Callable[..., LLM]]:
    """Makes an LLM of two ranks, one of which goes wrong in a step."""
    made = []

    def make(kind: type, limits: Limits | None = None, size: int = 2) -> LLM:
        config = EngineConfig(model=str(tiny_folder), tensor_parallel_size=size, **options())
        runner = f"{rank_faults.__name__}:{kind.__name__}"
        executor = TensorParallelExecutor(config, limits=limits, runner=runner)
        made.append(LLM.over(executor, load_tokenizer(tiny_folder), config))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def test_two_ranks_give_the_tokens_of_one(wanted: LLM, two: LLM) -> None:
    """Greedy and seeded, several choices, log-probabilities; in chunks, preempted, swapped, and
    from the cache."""
    alone = ask(wanted)
    check_same(ask(two), alone)
    stats = two.engine.stats
    assert stats.preemptions > 0
    assert two.engine.scheduler.num_swap_outs > 0
    for _ in range(2):
        check_same(ask(two, [70]), ask(wanted, [70]))
    assert two.engine.stats.cached_tokens > 0
    two.engine.scheduler.check()


def test_a_grammar_holds_over_ranks(wanted: LLM, two: LLM) -> None:
    params = SamplingParams(
        temperature=1, seed=5, max_tokens=20, structured_outputs={"regex": "(ab|cd){3,6}[0-9]"}
    )
    texts = [llm.generate("x", params, use_tqdm=False)[0].outputs[0].text for llm in (wanted, two)]
    assert texts[0] == texts[1]
    assert re.fullmatch("(ab|cd){3,6}[0-9]", texts[0])


def test_an_engine_says_that_it_is_parallel(two: LLM) -> None:
    found = two.engine.explain()["tensor parallel"]
    assert re.fullmatch(r"2 ranks over (gloo|shared memory)", found)
    (name,) = workers_of(two).values()
    title = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")[0]
    assert title.startswith(b"octavo rank 1: ")


def test_a_killed_rank_ends_all_with_its_reason(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), tensor_parallel_size=2, **options())
    ((rank, process),) = workers_of(llm).items()
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    os.kill(process, signal.SIGKILL)
    reason = re.escape(f"rank {rank} (process {process}) was killed by SIGKILL")
    with pytest.raises(EngineDeadError, match=reason):
        list(stream)
    with pytest.raises(EngineDeadError, match=reason):
        ask(llm)
    assert is_gone(process)
    llm.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size=3 .*possible: 1, 2"),
        ({"distributed_executor_backend": "uni"}, "'uni' is one process"),
        ({"device": "cuda:1"}, r"device='cuda:1' is one GPU, and tensor_parallel_size=2 takes 2"),
        ({"device": "cuda", "tensor_parallel_size": 64}, "tensor_parallel_size is 64, and this"),
        ({"device": "interpret"}, "needs device 'cpu' or 'cuda', not 'interpret'"),
    ],
)
def test_what_cannot_be_is_refused_before_a_process_is_started(
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
) -> None:
    def start(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(ConfigError, match=message):
        create_executor(
            EngineConfig(
                model=str(tiny_folder), **{"tensor_parallel_size": 2, **options(**changes)}
            )
        )


def test_ctrl_c_while_ranks_start_leaves_no_process(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: object) -> None:
        assert len(children_of(os.getpid())) > len(before)
        raise KeyboardInterrupt

    before = children_of(os.getpid())
    monkeypatch.setattr(Workers, "meet", interrupt)
    config = EngineConfig(model=str(tiny_folder), tensor_parallel_size=2, **options())
    with pytest.raises(KeyboardInterrupt):
        create_executor(config)
    assert children_of(os.getpid()) == before


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_any_number_of_ranks_gives_the_tokens_of_one(
    tiny_folder: Path, wanted: LLM, size: int
) -> None:
    alone = ask(wanted)
    for changes in ({}, {**TIGHT, "preemption_mode": "recompute", "async_scheduling": True}):
        with LLM(str(tiny_folder), tensor_parallel_size=size, **options(**changes)) as llm:
            check_same(ask(llm), alone)
            assert (llm.engine.stats.preemptions > 0) == bool(changes)


class Network(LocalWorkers):
    """Workers that are reached by nothing but TCP, as those on other machines are."""

    def bind(self, plans: AnySocket, reports: AnySocket) -> tuple[str, str]:
        host = "127.0.0.1"
        for socket in (plans, reports):
            socket.bind(f"tcp://{host}:*")
        self._meeting = Rendezvous(address=host, port=free_port(host), host=host)
        return tuple(s.getsockopt(zmq.LAST_ENDPOINT).decode().strip("\0") for s in (plans, reports))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_over_a_network_give_the_tokens_of_one(
    tiny_folder: Path, wanted: LLM, size: int
) -> None:
    config = EngineConfig(model=str(tiny_folder), tensor_parallel_size=size, **options(**TIGHT))
    executor = TensorParallelExecutor(config, Network(config))
    with LLM.over(executor, load_tokenizer(tiny_folder), config) as llm:
        assert llm.engine.explain()["tensor parallel"] == f"{size} ranks over gloo"
        check_same(ask(llm), ask(wanted))
        processes = workers_of(llm)
        os.kill(processes[size - 1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"rank {size - 1} .* was killed by SIGKILL"):
            ask(llm)
    assert all(map(is_gone, processes.values()))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", [SLO if n == "slo" else n for n in policy_names()])
def test_every_scheduler_gives_the_tokens_of_one(
    tiny_folder: Path, wanted: LLM, scheduler: str
) -> None:
    changes = options(**TIGHT, scheduler=scheduler)
    with LLM(str(tiny_folder), tensor_parallel_size=2, **changes) as llm:
        check_same(ask(llm), ask(wanted))


@pytest.mark.slow
def test_a_server_whose_rank_is_killed_while_idle_says_so(tiny_folder: Path) -> None:
    """Nobody asks for anything: the engine process ends, with the reason, and so do its ranks."""
    engine = {**options(), "tensor_parallel_size": 2}
    with serving.Server(tiny_folder, {}, EXECUTOR, **engine) as server:
        assert server.complete("abc", max_tokens=3)["usage"]["completion_tokens"] == 3
        (worker,) = children_of(server.engine_pid)
        os.kill(worker, signal.SIGKILL)
        assert server.end() == 1
        reason = f"rank 1 (process {worker}) was killed by SIGKILL"
        assert server.service.client.reason == reason
        assert is_gone(worker)


@pytest.mark.slow
def test_a_request_goes_on_when_a_rank_of_its_engine_is_killed(tiny_folder: Path) -> None:
    """Two engines of two ranks each: four processes with a part of the model."""
    engine = {**options(), "tensor_parallel_size": 2, "data_parallel_size": 2}
    asked = {"max_tokens": 100, "temperature": 1, "seed": 7, "ignore_eos": True}
    with serving.Server(tiny_folder, {}, EXECUTOR, **engine) as server:
        whole = server.complete("abc", **asked)["choices"][0]["text"]
        processes = [link.process.pid for link in server.service.client.links]
        workers = [children_of(process) for process in processes]
        assert [len(found) for found in workers] == [1, 1]
        body = {"prompt": "abc", "stream": True, **asked}
        with server.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = (line[6:] for line in reply.iter_lines() if line.startswith("data: {"))
            text = json.loads(next(lines))["choices"][0]["text"]
            (request,) = server.service.client._requests.values()
            os.kill(workers[request.link.index][0], signal.SIGKILL)
            text += "".join(json.loads(line)["choices"][0]["text"] for line in lines)
        assert text == whole


@pytest.mark.slow
def test_a_server_that_is_killed_leaves_no_rank(tiny_folder: Path) -> None:
    engine = {**options(), "tensor_parallel_size": 4}
    with serving.Server(tiny_folder, {}, EXECUTOR, **engine) as server:
        workers = children_of(server.engine_pid)
        assert len(workers) == 3
        os.kill(server.engine_pid, signal.SIGKILL)
        for worker in workers:
            while not is_gone(worker):
                os.sched_yield()
        server.end()


@pytest.mark.slow
def test_the_default_pool_of_two_ranks_is_that_of_one(tiny_folder: Path) -> None:
    changes = {**options(), "num_gpu_blocks_override": None, "max_num_seqs": 4}
    sizes = []
    for size in (1, 2):
        with LLM(str(tiny_folder), tensor_parallel_size=size, **changes) as llm:
            limits = llm.engine.limits
            sizes.append((limits.num_blocks, limits.block_bytes * size, limits.num_host_blocks))
    assert sizes[0] == sizes[1]


@pytest.mark.slow
def test_an_error_of_a_rank_is_the_reason(faulty: Callable[..., LLM]) -> None:
    llm = faulty(rank_faults.Raises)
    processes = workers_of(llm)
    with pytest.raises(EngineDeadError, match=r"rank 1: ValueError: a kernel that is not there"):
        ask(llm)
    assert all(map(is_gone, processes.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "limits", "message"),
    [
        (rank_faults.Stops, Limits(silent=2.0), r"rank 1 \(process \d+\) has been silent"),
        (rank_faults.Sleeps, Limits(stall=2.0), r"rank 1 \(process \d+\) hangs: no rank has begun"),
    ],
)
def test_a_rank_that_hangs_ends_all(
    faulty: Callable[..., LLM], kind: type, limits: Limits, message: str
) -> None:
    llm = faulty(kind, limits)
    processes = workers_of(llm)
    with pytest.raises(EngineDeadError, match=message):
        ask(llm)
    assert all(map(is_gone, processes.values()))


@pytest.mark.slow
def test_an_error_of_rank_0_ends_the_others(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(str(tiny_folder), tensor_parallel_size=2, **options())
    processes = workers_of(llm)

    def fail(*arguments: object) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(llm.engine.executor._runner.model, "forward", fail)  # type: ignore[attr-defined]
    monkeypatch.setattr(llm.engine.executor._runner, "captured", None)  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError, match="ValueError: no such kernel"):
        ask(llm)
    assert all(map(is_gone, processes.values()))
    llm.close()


@pytest.mark.slow
def test_a_rank_that_cannot_start_says_why(faulty: Callable[..., LLM]) -> None:
    before = children_of(os.getpid())
    with pytest.raises(ConfigError, match="rank 1: threads must be fewer here"):
        faulty(rank_faults.Refuses)
    assert children_of(os.getpid()) == before


@pytest.mark.slow
def test_no_process_is_left_by_an_llm_that_is_deleted_or_a_program_that_ends(
    tiny_folder: Path, tmp_path: Path
) -> None:
    llm = LLM(str(tiny_folder), tensor_parallel_size=2, **options())
    processes = workers_of(llm)
    del llm
    gc.collect()
    assert all(map(is_gone, processes.values()))
    program = (
        "import os, signal, sys, time; from octavo import LLM\n"
        f"llm = LLM({str(tiny_folder)!r}, tensor_parallel_size=2, **{options()!r})\n"
        "workers = llm.engine.executor._workers._workers\n"
        "print(*[worker.process._process.pid for worker in workers.values()], flush=True)\n"
        "if sys.argv[1] == 'killed':\n"
        "    fork = os.fork()\n"  # which keeps the other end of the workers' standard input
        "    if not fork: time.sleep(1000)\n"
        "    print(fork, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for end, code in (("exits", 0), ("killed", -signal.SIGKILL)):
        output = tmp_path / end  # a pipe would be open as long as the fork
        with output.open("wb") as stream:
            done = subprocess.run(
                [sys.executable, "-c", program, end], stdout=stream, check=False,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        assert done.returncode == code
        worker, *forks = map(int, output.read_text().split())
        while not is_gone(worker):  # it sees that its parent has ended
            time.sleep(0.01)
        for fork in forks:
            os.kill(fork, signal.SIGKILL)


def children_of(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(one) for task in tasks for one in (task / "children").read_text().split()]
