"""Measures what `octavo serve` guarantees: start, overhead, many clients, an engine crash.

    python -m benchmarks.serving [--only start,overhead,crowd,death] [--reps 3] [--save]

start     seconds from `octavo serve` to the first 200 from /health, caches warm
overhead  W1 with 64 streaming clients: processor time per token of each process
crowd     1,000 requests at once, 8 running: each ends as 200, or as 503 with Retry-After
death     kill -9 of the engine under 32 streams: time until every client has an error; exit code
dashboard W1's first requests over HTTP in turn without and with a reader of the dashboard's stream
watched   the same offline: a loop of steps in one process, without and with views of the engine

The last two run only when they are named. Their reader is no browser, which has its own share of a
machine. With --save each check becomes a row in benchmarks/results/serving.jsonl. The last line is
JSON. Exit code 1 if a guarantee was broken.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from benchmarks.engines import model_file
from benchmarks.peers.octavo_http import stream_body
from benchmarks.rows import percentile, row, save
from benchmarks.server import Reply, ServeProcess, Stops, ask, cpu_seconds, run_client
from benchmarks.workloads import WORKLOADS, Job
from octavo import SamplingParams
from octavo.engine.watcher import Watcher
from octavo.llm_engine import LLMEngine
from octavo.server.dashboard_hub import INTERVAL_SECONDS, SHARE

_FLAGS = ("--dtype", "bfloat16", "--no-load-progress", "--kv-cache-memory-bytes", str(1 << 30),
          "--max-model-len", "4096")  # fmt: skip
_CROWD = 1000
_STREAMS = 32
_SOME = 6  # requests, of which a run takes a few seconds


@contextlib.contextmanager
def serving(model: str, *flags: str) -> Iterator[ServeProcess]:
    """A server that is ready; its log is discarded."""
    server = ServeProcess(model, *_FLAGS, *flags, log=subprocess.DEVNULL)
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def start(model: str, reps: int) -> dict[str, Any]:
    """With the model's own default settings, as a user starts it."""
    times = []
    for _ in range(reps + 1):  # the first one warms what is cold
        server = ServeProcess(model, "--no-load-progress", log=subprocess.DEVNULL)
        try:
            times.append(round(server.wait_ready(), 2))
        finally:
            server.close()
    return {"health_200_s": statistics.median(times[1:]), "all_s": times[1:], "kept": times[1] < 6}


def overhead(model: str, reps: int) -> dict[str, Any]:
    """A run during which we were stopped is not counted."""
    jobs = WORKLOADS["W1"](0)
    wanted = sum(job.max_tokens for job in jobs)
    runs: list[dict[str, float]] = []
    stops = Stops()
    with serving(model, "--max-num-seqs", "64") as server:
        asyncio.run(_streams(server.port, jobs[:4], "warm"))
        pids = {"web": server.process.pid, "engine": server.engine_pid(), "client": os.getpid()}
        for run in range(3 * reps):
            before, stopped = {n: cpu_seconds(pid) for n, pid in pids.items()}, stops.count
            begun = time.monotonic()
            replies = run_client(_streams(server.port, jobs, f"run {run}"))
            found = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
            found["wall"] = time.monotonic() - begun
            tokens = sum(reply.output_tokens for reply in replies)
            _say(f"W1 over HTTP: {found['wall']:.2f} s, {tokens / found['wall']:.1f} tokens/s")
            if stops.count == stopped:
                runs.append(found)
            if len(runs) == reps or tokens != wanted:
                break
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {
        "workload": "W1",
        "output_tokens_per_s": round(wanted / middle["wall"], 1),
        "walls_s": [round(run["wall"], 2) for run in runs],
        **{f"{name}_us_per_token": round(middle[name] / wanted * 1e6, 1) for name in pids},
        "stops": stops.count,
        "kept": tokens == wanted,
    }


async def _streams(port: int, jobs: list[Job], salt: str) -> list[Reply]:
    return await asyncio.gather(*(ask(port, stream_body(job, salt)) for job in jobs))


def crowd(model: str, reps: int) -> dict[str, Any]:
    """Once with the usual queue, which holds them all, and once with a short one."""
    found: dict[str, Any] = {"requests": _CROWD, "max_num_seqs": 8, "kept": True}
    for waiting in (None, 200):
        flags = () if waiting is None else ("--max-waiting", str(waiting))
        with serving(model, "--max-num-seqs", "8", *flags) as server:
            begun = time.monotonic()
            replies = asyncio.run(_crowd(server.port))
            wall = time.monotonic() - begun
            alive = server.health() == 200
        ends = Counter(_end(reply) for reply in replies)
        found[f"max_waiting_{waiting or 'default'}"] = {**ends, "wall_s": round(wall, 2)}
        found["kept"] &= alive and not ends.keys() - {"200", "503 with Retry-After"}
    return found


async def _crowd(port: int) -> list[Reply]:
    bodies = [
        {"prompt": f"Request {i} says", "max_tokens": 8, "temperature": 0, "ignore_eos": True,
         "stream": i % 2 == 0}
        for i in range(_CROWD)
    ]  # fmt: skip
    return await asyncio.gather(*(ask(port, body) for body in bodies))


def _end(reply: Reply) -> str:
    whole = b'"finish_reason":"length"' in reply.raw and b'{"error":' not in reply.raw
    if reply.status == 200:
        return "200" if whole else "200 without its end"
    return f"{reply.status}{' with Retry-After' if reply.retry_after else ''}"


def death(model: str, reps: int) -> dict[str, Any]:
    with serving(model, "--max-num-seqs", "64") as server:
        told, status = asyncio.run(_killed(server))
        begun = time.monotonic()
        code = server.process.wait(60)
        exit_s = time.monotonic() - begun
    with serving(model, "--max-num-seqs", "64", "--restart-engine") as server:
        again, _ = asyncio.run(_killed(server))
        begun = time.monotonic()
        server.wait_ready()
        restart_s = time.monotonic() - begun
        answer = asyncio.run(ask(server.port, {"prompt": "x", "max_tokens": 2}))
    both = [*told, *again]
    good = max(both) < 2 and status == 503 and code == 1 and answer.status == 200
    return {
        "streams": _STREAMS, "told_after_s": round(percentile(both, 0.5), 3),
        "last_told_after_s": round(max(both), 3), "health": status, "exit_code": code,
        "exit_after_s": round(exit_s, 2), "restart_engine_s": round(restart_s, 2), "kept": good,
    }  # fmt: skip


async def _killed(server: ServeProcess) -> tuple[list[float], int | None]:
    """(seconds from the kill to the end of each stream, /health right after)."""
    jobs = [Job([400 + i] * 8, 2000) for i in range(_STREAMS)]
    streams = [asyncio.create_task(ask(server.port, stream_body(job, "x"))) for job in jobs]
    await asyncio.sleep(3)
    os.kill(server.engine_pid(), signal.SIGKILL)
    killed = time.monotonic()
    replies = await asyncio.gather(*streams)
    for reply in replies:
        if b'{"error":' not in reply.raw or not reply.raw.rstrip().endswith(b"0"):
            _say(f"a stream ended with {bytes(reply.raw[-200:])!r}")
            return [60.0], server.health()
    return [reply.end - killed for reply in replies], server.health()


def dashboard(model: str, reps: int) -> dict[str, Any]:
    jobs = WORKLOADS["W1"](0)[:_SOME]
    walls: dict[str, list[float]] = {"closed": [], "open": []}
    costs: dict[str, list[float]] = {"closed": [], "open": []}
    events: list[int] = []
    stops = Stops()
    with serving(model, "--max-num-seqs", "64") as server:
        asyncio.run(_streams(server.port, jobs, "warm"))
        pids = (server.process.pid, server.engine_pid())
        for name in _turns(reps):
            before, begun = sum(map(cpu_seconds, pids)), time.monotonic()
            seen = run_client(_watched(server.port, jobs, name, len(walls[name])))
            walls[name].append(time.monotonic() - begun)
            costs[name].append(sum(map(cpu_seconds, pids)) - before)
            if name == "open":
                events.append(seen)
    cpu = {f"{name}_cpu_s": statistics.median(found) for name, found in costs.items()}
    return {**_compared(jobs, walls), **cpu, "events": events, "stops": stops.count}


async def _watched(port: int, jobs: list[Job], name: str, run: int) -> int:
    """Run the jobs, with a dashboard if it is open; returns how many events it got."""
    reader = Reply(b"GET /dashboard/events HTTP/1.1\r\nHost: x\r\n\r\n")
    if name == "open":
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: reader, "127.0.0.1", port)
    replies = await _streams(port, jobs, f"{name} {run}")
    if name == "open":
        transport.abort()
    wanted = sum(job.max_tokens for job in jobs)
    if sum(reply.output_tokens for reply in replies) != wanted:
        raise RuntimeError(f"not all of the {wanted} tokens came")
    return bytes(reader.raw).count(b"event: snapshot")


def watched(model: str, reps: int) -> dict[str, Any]:
    jobs = WORKLOADS["W1"](0)[:_SOME]
    walls: dict[str, list[float]] = {"closed": [], "open": []}
    options: dict[str, Any] = {"dtype": "bfloat16", "load_progress": False, "max_num_seqs": 64,
               "max_model_len": 4096, "kv_cache_memory_bytes": 1 << 30}  # fmt: skip
    llm = LLMEngine(model, **options)
    looks: list[float] = []
    try:
        for name in ("closed", *_turns(reps)):
            llm.engine.reset_prefix_cache()
            begun = time.monotonic()
            looks += _stepped(llm, jobs, Watcher(llm.engine) if name == "open" else None)
            walls[name].append(time.monotonic() - begun)
    finally:
        llm.close()
    walls["closed"].pop(0)  # it warms what is cold
    share = sum(looks) / sum(walls["open"])
    found = {"views": len(looks), "view_ms": round(1e3 * statistics.median(looks), 3)}
    return {**_compared(jobs, walls), **found, "share_of_time": round(share, 5)}


def _stepped(llm: LLMEngine, jobs: list[Job], watcher: Watcher | None) -> list[float]:
    """Run the jobs; returns the seconds of each look at the engine."""
    for number, job in enumerate(jobs):
        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True)
        llm.add_request(f"r{number}", {"prompt_token_ids": job.prompt}, params)
    encoder, due = msgspec.msgpack.Encoder(), 0.0
    looks: list[float] = []
    while llm.has_unfinished_requests():
        llm.step()
        if watcher is not None and (now := time.monotonic()) >= due:
            encoder.encode(watcher.view())
            looks.append(time.monotonic() - now)
            due = now + max(INTERVAL_SECONDS, looks[-1] / SHARE)
    return looks


def _turns(reps: int) -> list[str]:
    """closed and open, each `reps` times, in turn, so that drift is shared: c o o c c o..."""
    return [name for run in range(reps) for name in ("closed", "open")[:: 1 - 2 * (run % 2)]]


def _compared(jobs: list[Job], walls: dict[str, list[float]]) -> dict[str, Any]:
    """The throughput of each, and their ratio: of the medians, and pair by pair."""
    tokens = sum(job.max_tokens for job in jobs)
    rates = {name: tokens / statistics.median(found) for name, found in walls.items()}
    pairs = [c / o for c, o in zip(walls["closed"], walls["open"], strict=True)]
    return {
        "workload": f"W1, its first {len(jobs)} requests",
        **{f"{name}_tokens_per_s": round(rate, 1) for name, rate in rates.items()},
        **{f"{name}_walls_s": [round(wall, 3) for wall in found] for name, found in walls.items()},
        "open_of_closed": round(rates["open"] / rates["closed"], 4),
        "pairs": [round(pair, 4) for pair in pairs],
        "kept": rates["open"] >= 0.99 * rates["closed"],
    }


CHECKS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "start": start, "overhead": overhead, "crowd": crowd, "death": death,
    "dashboard": dashboard, "watched": watched,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2", help="embedded name or .gguf file")
    parser.add_argument(
        "--only", default="start,overhead,crowd,death", help="some of them, with commas"
    )
    parser.add_argument("--reps", type=int, default=3, help="of start and overhead")
    parser.add_argument("--save", action="store_true", help="save rows in benchmarks/results/")
    args = parser.parse_args()
    model = str(model_file(args.model))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a descriptor
    found = {}
    for name in args.only.split(","):
        if name not in CHECKS:
            parser.error(f"{name!r} is none of {', '.join(CHECKS)}")
        found[name] = CHECKS[name](model, args.reps)
        _say(f"{name}: {json.dumps(found[name])}")
        if args.save:
            save(row("serving", check=name, **found[name]))
    print(json.dumps(found))
    return 0 if all(values["kept"] for values in found.values()) else 1


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
