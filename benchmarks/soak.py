"""Misbehaving clients for a long time: does a server leak, hang, or leave a client waiting?

    python -m benchmarks.soak [--minutes 30] [--clients 32] [--cores 0.5] [--save]

Starts `octavo serve`, lets clients stream, hang up, time out, send garbage and read slowly, and
watches what clients saw, the slowest probe of `/health`, memory and file descriptors over time.
`--cores` paces the clients, so that server and clients use about so many cores on average. The
last line is JSON; `--save` appends it to benchmarks/results/soak.jsonl. Exit code 1 if a guarantee
of the server was broken.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.rows import percentile, row, save
from benchmarks.server import ServeProcess, Stops, cpu_seconds

_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "once", "more")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_PROMISED = 60.0  # seconds in which every whole request must be answered


@dataclass
class Seen:
    """What clients, probes and the kernel saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    health: list[float] = field(default_factory=list)  # seconds of each probe
    web_mb: list[float] = field(default_factory=list)  # resident, each second
    engine_mb: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    pause: float = 0.0  # mean seconds between two requests of a client
    stops: Stops = field(default_factory=Stops)


class Client:
    """One connection at a time to `host:port`, by hand: libraries are too polite."""

    def __init__(self, host: str, port: int, seen: Seen, rng: random.Random) -> None:
        self.host = host
        self.port = port
        self.seen = seen
        self.rng = rng

    def request(self, stream: bool, tokens: int) -> bytes:
        words = self.rng.choices(_WORDS, k=self.rng.randint(1, 60))
        if self.rng.random() < 0.5:
            path, ask = "/v1/completions", {"prompt": " ".join(words)}
        else:
            path = "/v1/chat/completions"
            ask = {"messages": [{"role": "user", "content": " ".join(words)}]}  # type: ignore[dict-item]
        body = json.dumps(
            {**ask, "stream": stream, "max_tokens": tokens, "ignore_eos": True,
             "n": self.rng.choice([1, 1, 1, 2]), "seed": self.rng.randint(0, 99)}
        ).encode()  # fmt: skip
        return self.head(path, len(body)) + body

    def head(self, path: str, length: int) -> bytes:
        return (
            f"POST {path} HTTP/1.1\r\nHost: soak\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    @contextlib.asynccontextmanager
    async def open(self, receive_buffer: int = 0) -> AsyncIterator[Streams]:
        raw = socket.socket()
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(raw, (self.host, self.port))
        except OSError:
            raw.close()
            raise
        reader, writer = await asyncio.open_connection(sock=raw, limit=1 << 20)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def whole(self) -> str:
        """A well-behaved client: every such request is answered or refused, in time."""
        stream = self.rng.random() < 0.6
        async with self.open() as (reader, writer):
            writer.write(self.request(stream, self.rng.choice([1, 8, 32, 64])))
            raw = await asyncio.wait_for(reader.read(), _PROMISED)
        status = raw.split(b" ", 2)[1:2]
        if status == [b"503"] and b"retry-after" in raw.lower():
            return "refused"
        good = b"data: [DONE]" in raw or not stream
        if status != [b"200"] or not good or b'{"error":' in raw:
            self.seen.broken.append(f"a whole request got {raw[:300]!r}")
        return "answered"

    async def leaves(self) -> str:
        how = self.rng.choice(["fin", "rst", "half"])
        async with self.open() as (reader, writer):
            writer.write(self.request(True, 200))
            for _ in range(self.rng.randint(0, 6)):
                if not await reader.readline():
                    break
            if how == "half":
                writer.write_eof()
                await asyncio.sleep(0.2)
            elif how == "rst":
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return f"left by {how}"

    async def impatient(self) -> str:
        async with self.open() as (reader, writer):
            writer.write(self.request(False, 200))
            try:
                await asyncio.wait_for(reader.read(1), self.rng.uniform(0.01, 0.5))
            except asyncio.TimeoutError:
                return "timed out"
        return "answered before its time-out"

    async def garbage(self) -> str:
        bodies = [
            b"", b"{", b"[]", b'{"prompt": 5}', b'{"prompt": "x", "n": 1e999}', b"[" * 50_000,
            b'{"prompt": "x", "zzz": 1}', self.rng.randbytes(500), b'{"messages": [{"role": 1}]}',
        ]  # fmt: skip
        body = self.rng.choice(bodies)
        path = self.rng.choice(["/v1/completions", "/tokenize", "/x"])
        whole = self.head(path, len(body)) + body
        if self.rng.random() < 0.2:
            whole = self.rng.choice([self.rng.randbytes(300), b"GET / HTTP/9\r\n\r\n", b"\r\n\r\n"])
        async with self.open() as (reader, writer):
            writer.write(whole)
            if self.rng.random() < 0.3 or b"Connection: close" not in whole:
                writer.write_eof()
            raw = await asyncio.wait_for(reader.read(), _PROMISED)
        if raw and not raw.startswith((b"HTTP/1.1 4", b"HTTP/1.1 503")):
            self.seen.broken.append(f"garbage {whole[-60:]!r} got {raw[:300]!r}")
        return "garbage refused" if raw else "garbage dropped"

    async def slow(self) -> str:
        """Reads little, or nothing at all, for a while."""
        reads = self.rng.random() < 0.5
        async with self.open(receive_buffer=2048) as (reader, writer):
            writer.write(self.request(True, 200))
            for _ in range(20):
                await asyncio.sleep(0.1)
                if reads:
                    await reader.read(256)
        return "read slowly" if reads else "read nothing"

    async def forever(self, end: float) -> None:
        kinds: list[Callable[[], Awaitable[str]]] = [
            self.whole, self.whole, self.leaves, self.impatient, self.garbage, self.slow,
        ]  # fmt: skip
        while time.monotonic() < end:
            if self.seen.pause:
                await asyncio.sleep(min(self.rng.expovariate(1 / self.seen.pause), 60))
            kind, begun = self.rng.choice(kinds), time.monotonic()
            try:
                self.seen.outcomes[await kind()] += 1
            except asyncio.TimeoutError:
                if self.seen.stops.last < begun:
                    self.seen.broken.append(f"{kind.__name__}: no answer in {_PROMISED:g} s")
            except OSError as error:
                self.seen.outcomes[f"{kind.__name__}: {type(error).__name__}"] += 1


def family(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def watch(pid: int, seen: Seen, end: float, cores: float | None) -> None:
    """Sample each second; slow the clients down while more than `cores` are used."""
    used, last = 0.0, time.monotonic()
    while time.monotonic() < end:
        pids = family(pid)
        web, *engine = map(resident_mb, pids)
        seen.web_mb.append(round(web, 1))
        seen.engine_mb.append(round(sum(engine), 1))
        seen.descriptors.append(sum(len(os.listdir(f"/proc/{p}/fd")) for p in pids))
        spent, now = sum(map(cpu_seconds, (*pids, os.getpid()))), time.monotonic()
        if used:
            seen.cores.append((spent - used) / (now - last))
            if cores:
                mean = sum(seen.cores[-20:]) / len(seen.cores[-20:])
                seen.pause = min(60.0, max(0.05, seen.pause * min(1.5, max(0.8, mean / cores))))
        used, last = spent, now
        await asyncio.sleep(1)


async def get(host: str, port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n".encode())
    raw = await asyncio.wait_for(reader.read(), _PROMISED)
    writer.close()
    return raw


def probe(host: str, port: int, seen: Seen, end: float) -> None:
    """In a thread of its own, so that what our clients do meanwhile is not counted."""
    while time.monotonic() < end:
        begun = time.monotonic()
        try:
            with socket.create_connection((host, port), _PROMISED) as raw:
                raw.sendall(b"GET /health HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n")
                good = raw.recv(64).startswith(b"HTTP/1.1 200")
            trouble = None if good else "/health was not 200"
        except OSError as error:
            trouble = f"/health: {error}"
        took = time.monotonic() - begun
        time.sleep(0.2)
        if seen.stops.last >= begun:  # it was not the server that took so long
            continue
        seen.health.append(took)
        if trouble:
            seen.broken.append(trouble)


async def idle(host: str, port: int) -> bool:
    """Whether nothing runs, waits or holds blocks any more."""
    for _ in range(100):
        text = (await get(host, port, "/metrics")).decode()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        lines = [
            line for line in text.splitlines() if line.startswith(tuple("vllm:" + n for n in names))
        ]
        if lines and all(float(line.split()[-1]) == 0 for line in lines):
            return True
        await asyncio.sleep(0.1)
    return False


async def soak(
    url: str, pid: int, seconds: float, clients: int, seed: int = 0, cores: float | None = None
) -> Seen:
    """Run `clients` clients against the server for `seconds`."""
    host, port = urlsplit(url).hostname or "127.0.0.1", urlsplit(url).port or 80
    seen, end = Seen(pause=1.0 if cores else 0.0), time.monotonic() + seconds
    people = [Client(host, port, seen, random.Random(seed + i)) for i in range(clients)]
    await asyncio.gather(
        watch(pid, seen, end, cores),
        asyncio.to_thread(probe, host, port, seen, end),
        *(person.forever(end) for person in people),
    )
    if not await idle(host, port):
        seen.broken.append("something still runs, waits or holds blocks")
    await asyncio.sleep(1)
    pids = family(pid)
    seen.descriptors.append(sum(len(os.listdir(f"/proc/{p}/fd")) for p in pids))
    return seen


def growth(samples: list[float]) -> float:
    """From the mean of the second sixth to the mean of the last sixth."""
    part = max(1, len(samples) // 6)
    early, late = samples[part : 2 * part] or samples, samples[-part:]
    return sum(late) / len(late) - sum(early) / len(early)


def summary(seen: Seen) -> dict[str, Any]:
    outcomes = dict(sorted(seen.outcomes.items()))
    return {
        "requests": sum(outcomes.values()),
        "outcomes": outcomes,
        "broken": len(seen.broken),
        "health_max_s": round(max(seen.health), 3),
        "health_p99_s": round(percentile(seen.health, 0.99), 3),
        "probes": len(seen.health),
        "stops": seen.stops.count,
        "web_growth_mb": round(growth(seen.web_mb), 1),
        "engine_growth_mb": round(growth(seen.engine_mb), 1),
        "web_mb": seen.web_mb[:: max(1, len(seen.web_mb) // 30)],
        "engine_mb": seen.engine_mb[:: max(1, len(seen.engine_mb) // 30)],
        "descriptors": [seen.descriptors[0], max(seen.descriptors), seen.descriptors[-1]],
        "cores_used": round(sum(seen.cores) / max(1, len(seen.cores)), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2", help="embedded name or .gguf file")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--cores", type=float, help="cores to use, clients included; none: all")
    parser.add_argument("--note", help="what else ran on the machine, for the row")
    parser.add_argument("--save", action="store_true", help="save a row in benchmarks/results/")
    args = parser.parse_args()
    # A pool that is soon written to its end: pages of it that nobody touched yet are not resident.
    flags = ("--stall-timeout", "20", "--no-load-progress", "--kv-cache-memory-bytes", str(1 << 28))
    server = ServeProcess(args.model, *flags)
    try:
        server.wait_ready()
        url, pid = f"http://127.0.0.1:{server.port}", server.process.pid
        seen = asyncio.run(soak(url, pid, args.minutes * 60, args.clients, cores=args.cores))
    finally:
        if (code := server.process.poll()) is not None:
            print(f"the server had ended, with exit code {code}", file=sys.stderr)
        server.close()
    for problem in seen.broken[:20]:
        print("broken:", problem, file=sys.stderr)
    found = {"minutes": args.minutes, "clients": args.clients, **summary(seen), "note": args.note}
    if args.save:
        save(row("soak", **found))
    print(json.dumps(found))
    return 1 if seen.broken or max(seen.health) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
