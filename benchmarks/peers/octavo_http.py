"""Octavo through its server: one streaming client per request, over HTTP on this machine."""

import asyncio
from collections.abc import Callable
from typing import Any

from benchmarks.protocol import Outcome, serve
from benchmarks.server import ServeProcess, ask, run_client
from benchmarks.workloads import Job
from octavo.utils.flags import flag_name
from octavo.version import __version__


class OctavoServer:
    """`octavo serve` as a child, driven with token ids."""

    def __init__(self, options: dict[str, Any]) -> None:
        options = {"max_num_seqs": 64, "max_model_len": 4096, **options}
        model = options.pop("model")
        flags: list[str] = []
        for name, value in options.items():
            flag = flag_name(name)
            if value is False:
                flag = flag.replace("--", "--no-", 1)
            flags += [flag] if isinstance(value, bool) else [flag, str(value)]
        self._server = ServeProcess(model, *flags)
        self._server.wait_ready()
        self._runs = 0
        self.facts = {"build": f"octavo {__version__} serve", "streaming": True}

    def run(self, jobs: list[Job], done: Callable[[int], None]) -> Outcome:
        return run_client(self._run(jobs))

    async def _run(self, jobs: list[Job]) -> Outcome:
        bodies = [stream_body(job, f"run {self._runs}") for job in jobs]
        replies = await asyncio.gather(*(ask(self._server.port, body) for body in bodies))
        begin = min(reply.begun for reply in replies)
        return Outcome(
            output_tokens=sum(reply.output_tokens for reply in replies),
            latency_s=[reply.end - begin for reply in replies],
        )

    def forget(self) -> None:
        """A salt of its own keeps a run from an earlier run's prefixes."""
        self._runs += 1


def stream_body(job: Job, salt: str) -> dict[str, Any]:
    """A request that streams exactly what the job asks for."""
    return {
        "prompt": job.prompt, "max_tokens": job.max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt,
    }  # fmt: skip


if __name__ == "__main__":
    serve(OctavoServer)
